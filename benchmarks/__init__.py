"""The engine beside Keras ``fit`` and custom loops: ``python -m benchmarks``."""

"""Compares the speed of the engine with Keras ``fit`` and custom loops (python -m benchmarks)."""

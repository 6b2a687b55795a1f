"""Tests of the engine. Every generated project contains them in ``tests/engine/``.

They train small programs through the public interface and compare **weights** with those of the
plain loop in ``reference_loop.py``. If you change ``ctl_core/``, these tests tell you whether it
still trains correctly. They take less than a minute on a CPU.
"""

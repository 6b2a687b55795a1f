"""Programs that others wrote, each as hooks and as a plain loop; each module has ``PROGRAM``.

No test and no device is in them; ``tests/golden/test_programs.py`` trains all.
"""

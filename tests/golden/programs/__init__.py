"""Programs that others wrote, as hooks; each module has ``PROGRAM``, and ``basics`` several.

No test and no device is in them; ``tests/golden/test_programs.py`` trains all.
"""

BASICS = ("batch_norm", "embedding", "l2", "lazy_penalty", "multi_task", "ragged", "two_by_two")

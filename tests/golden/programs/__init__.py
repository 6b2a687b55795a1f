"""Programs in the style of users; each module defines ``PROGRAM``, and ``basics`` several.

They do not choose the devices and contain no tests; ``tests/golden/test_programs.py`` trains all of
them.
"""

BASICS = ("batch_norm", "embedding", "l2", "lazy_penalty", "multi_task", "ragged", "two_by_two")

"""Checkpoints and their records: which one a run starts from, writing, restoring, deleting."""

"""Writes, restores and deletes checkpoints, and finds the one that a run starts from."""

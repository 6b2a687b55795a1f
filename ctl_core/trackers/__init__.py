"""Logging a run to services that compare runs: one small module each, fed from its files."""

"""Evaluates models: each example counts exactly once, and training is not affected."""

"""Evaluation: each example once, and no trace of it in training."""

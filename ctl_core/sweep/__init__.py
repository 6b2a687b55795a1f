"""Searching settings: many runs, each a process of its own, steered by Optuna."""

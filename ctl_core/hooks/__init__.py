"""The hooks of a run: the table, callbacks.py, what they return and what they create."""

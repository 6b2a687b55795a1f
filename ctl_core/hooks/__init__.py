"""The hooks of a run: the table, callbacks.py, what hooks return and what they create."""

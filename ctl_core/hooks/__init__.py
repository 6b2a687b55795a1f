"""The hooks of a run: the table, callbacks.py, their results and the objects that they create."""

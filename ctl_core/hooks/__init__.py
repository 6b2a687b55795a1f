"""The hooks of a run: their table, the file callbacks.py, and the objects that hooks create."""

"""The commands that use a run; training imports none of them."""

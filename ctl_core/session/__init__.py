"""Manages the session of a run: its folder, the files in this folder, and messages to the user."""

"""A run as a session: its folder, what it writes there, and what it tells the user."""

"""Connects devices and processes, and exchanges values between them."""

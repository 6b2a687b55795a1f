"""Trains on several devices and processes: forms the cluster, and exchanges values within it."""

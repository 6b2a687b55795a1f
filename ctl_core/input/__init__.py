"""Reads the dataset of the hooks, and divides its global batches among the replicas."""

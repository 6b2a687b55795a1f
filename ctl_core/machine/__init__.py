"""Finds out why TensorFlow cannot use the GPUs of a machine; nothing here imports TensorFlow."""

"""Readers in Python, besides tf.data: what is read, where it is, and how to get there again."""

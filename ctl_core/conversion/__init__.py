"""Converts the model of a checkpoint to other formats, and proves that the files are right."""

"""Several devices and processes: how each knows its place, and how they exchange values."""

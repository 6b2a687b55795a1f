"""Rate, precision, freezing, random state, moving statistics, and copies of values."""

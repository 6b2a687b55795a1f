"""Learning rate, precision, sums, averages, what replicas have of their own, copies of values."""

"""Learning rate, loss scale, sums, averages, what replicas have of their own, copies of values."""

"""Numerics: sums, precision, random numbers, the learning rate, and the variables of models."""

"""Looking into a run on request: where a NaN came from, how gradients and weights are."""

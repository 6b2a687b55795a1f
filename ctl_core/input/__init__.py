"""The training data: what the hooks return -> global batches -> the share of each replica."""

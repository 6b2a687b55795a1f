"""The training data: the dataset of the hooks -> global batches -> the share of each replica."""

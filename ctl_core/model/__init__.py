"""What the objects of the hooks become: the variables, layers and parts of a run."""

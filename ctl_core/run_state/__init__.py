"""What of a run is on the disk, beside its checkpoints."""

"""A run on the disk: its folder, checkpoints and their records, how it begins and goes on."""

"""What belongs to a run, and how it is kept: found, recorded, put back."""

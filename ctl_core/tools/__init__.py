"""What a trained run is used with, on the command line."""

"""What is tried and looked at before training, so that a mistake is refused in one line."""

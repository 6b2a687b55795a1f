"""The folder of a run, what is written there, and who listens to what a run says."""

"""The settings of a run, its console and its listeners, without TensorFlow."""

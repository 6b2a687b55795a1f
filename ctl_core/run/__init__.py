"""Settings, console, listeners, error messages and files; nothing here imports TensorFlow."""

"""Settings: kinds of values, files, flags. Knows nothing of training."""

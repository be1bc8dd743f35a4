"""Learning rates of large batches."""

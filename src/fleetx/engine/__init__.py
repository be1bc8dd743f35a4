"""One update, from a loss to new weights: slots, buckets, the step. Read step.py first."""

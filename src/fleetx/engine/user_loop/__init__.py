"""Serve the loop a user has: a bare backward, no_sync, a GradScaler by hand, steps of other optimizers, a model in DDP."""

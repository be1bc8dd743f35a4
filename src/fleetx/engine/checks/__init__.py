"""Checks of each step: gradients, losses, ranks that drift apart. Flags travel with the gradients, so all ranks react alike."""

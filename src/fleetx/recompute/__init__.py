"""Less memory in a step: which modules to compute again in backward (units), and how to do that to the bit (replay)."""

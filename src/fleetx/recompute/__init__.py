"""Save memory in a step: which modules to compute again in backward (units, plan), and how to do so to the bit (replay)."""

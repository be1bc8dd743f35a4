"""Compress gradients before they are sent: the stage (compressor), and the maths of DGC and PowerSGD."""

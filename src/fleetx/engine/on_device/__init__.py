"""Decide on the device whether an update is made, so that the host need not wait for the answer."""

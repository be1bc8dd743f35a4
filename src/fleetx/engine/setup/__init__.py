"""Make a pair of a model, an optimizer and a strategy, and end it: check, place, build, connect, record."""

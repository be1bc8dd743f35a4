"""Change a module's forward in place; keep its copies, pickles, autocast and random numbers as they would be without."""

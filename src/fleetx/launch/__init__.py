"""`fleetrun`: start a script on several ranks, one log file for each, and end with an exit code that tells the truth."""

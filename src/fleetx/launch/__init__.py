"""`fleetrun`: start a script on several ranks with a log file each, and return the exit code of the rank that failed first."""

"""`fleetx`: what can be asked from the command line. One subcommand is one file."""

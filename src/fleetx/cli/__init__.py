"""The `fleetx` command. Each subcommand is one file."""

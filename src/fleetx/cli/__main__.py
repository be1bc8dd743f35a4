"""So that `python -m fleetx.cli plan` is `fleetx plan`, and `fleetrun -m fleetx.cli plan` the same on several ranks."""

from fleetx.cli.main import command

if __name__ == "__main__":
    command()

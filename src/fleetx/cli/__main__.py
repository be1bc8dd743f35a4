"""Run `fleetx` as a module: `python -m fleetx.cli plan`, or `fleetrun -m fleetx.cli plan` on several ranks."""

from .main import command

if __name__ == "__main__":
    command()

"""Run `fleetrun` as a module: `python -m fleetx.launch train.py`."""

from .fleetrun import command

if __name__ == "__main__":
    command()

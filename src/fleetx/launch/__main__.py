"""So that `python -m fleetx.launch train.py` is `fleetrun train.py`."""

from fleetx.launch.fleetrun import command

if __name__ == "__main__":
    command()

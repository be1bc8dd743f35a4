"""So that `python -m fleetx.launch train.py` is `fleetrun train.py`."""

import sys

from fleetx.launch.fleetrun import main

if __name__ == "__main__":
    sys.exit(main())

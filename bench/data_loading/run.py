"""Do data keep up? Loaders beside what the machine can do at most, and beside the usual tools; medians of paired passes.

    python -m bench.data_loading.run                                self-made JPEGs, as many workers as half of the cores
    python -m bench.data_loading.run --cifar DIR --workers 8        CIFAR-10 as files with `train.txt` for the 32 x 32 row
    python -m bench.data_loading.run --smoke                        a few seconds, to see that it runs; nothing is kept

Rows `images_*`: images per second of ours, of as many bare processes decoding and cropping (`limit`; `of_limit` should be 0.9
or more), and of torchvision's ImageFolder with v2 transforms where it can be imported (`of_torchvision`: 0.99 or more).
Rows `text_*`: batches per second of BERT's loader, and on a GPU how many times faster that is than the models use them up
(`times_faster`: 20 or more).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.data_loading.images import image_figures
from bench.data_loading.text import text_figures
from bench.lib.results import publish
from fleetx import fleet

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"images": image_figures, "text": text_figures}
"""One function for each kind of data, in a file of its own: arguments -> rows."""


def main() -> int:
    args = arguments()
    os.environ["FLEETX_DEVICE"] = args.device
    if args.device == "cpu":
        torch.set_num_threads(1)
    fleet.init()
    figures: dict[str, Any] = {"target": args.device}
    for part in args.parts.split(","):
        figures |= PARTS[part](args)
    if args.smoke:
        print(json.dumps(figures))
    else:
        publish(args.name, figures)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--blocks", type=int, default=15, help="passes of each kind")
    parser.add_argument("--cifar", default=None, help="a folder with train.txt for the 32 x 32 row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--name", default=None, help="name of the results file")
    args = parser.parse_args()
    args.small, args.photos = (200, 40) if args.smoke else (10_000, 1000)
    args.rounds_of_workers = {"small": 2, "photos": 1} if args.smoke else {"small": 48, "photos": 16}
    args.blocks = 3 if args.smoke else args.blocks
    args.name = args.name or ("data_loading_cuda" if args.device == "cuda" else "data_loading")
    return args


if __name__ == "__main__":
    sys.exit(main())

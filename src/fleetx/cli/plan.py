"""Flags of `fleetx plan TARGET`. The work is in planning.py, which is imported late since it imports torch."""

from __future__ import annotations

import argparse

from ..errors import ConfigError, did_you_mean
from .flags import arg_type, bandwidth, count, duration, file, memory, readable, settings

HELP = "measure a model on this machine and choose a strategy to train it with"
APPLICATIONS = ("Resnet20", "Resnet50", "VGG16", "Bert_base", "Bert_large")
RISKS = ("exact", "rounding", "lossy", "schedule")
LARGEST = 10**9
CHANGES = {"bandwidth": bandwidth(), "latency": duration(), "world": count(1, 10**6), "memory": memory()}

TEXT = f"""\
Measure a model on this machine, choose a strategy to train it with, and say why.

TARGET is one of
  an application     {", ".join(APPLICATIONS)}, with random data
  module:function    from the working folder; the function takes nothing and returns
                     (model, optimizer, sample) or (model, optimizer, sample, loss_fn)
  plan.json          a plan written by --out: nothing is measured
"""
EXAMPLES = """\
examples:
  fleetx plan Resnet20 --batch 64 --out plan.json
  fleetx plan --estimate Bert_large --memory 32GB                (what fits, by arithmetic)
  fleetrun --nproc_per_node 2 -m fleetx.cli plan train:make --risk lossy     (several ranks, and the link between them)
  fleetx plan plan.json --what-if bandwidth=10Gbit,latency=50us,world=64,memory=32GB --chart step_time.png

--what-if changes the link of each rank (bandwidth, latency), the number of ranks (world) or the memory of each, and predicts
which strategy would be chosen there. With a changed link or number of ranks, or with --chart, it also predicts the time of an
update for 2 to 4096 ranks.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TEXT, EXAMPLES
    parser.add_argument("target", metavar="TARGET", help="model to plan for")
    risk_help = "how far a strategy may go from plain training: %(choices)s (default: rounding)"
    parser.add_argument("--risk", choices=RISKS, metavar="RISK", help=risk_help)
    parser.add_argument(
        "--memory", type=arg_type(memory()), metavar="32GB", help="memory limit (default: all memory of the device)"
    )
    batch_help = "samples per update over all ranks (default: one TARGET sample on each)"
    parser.add_argument("--global-batch", type=arg_type(count(1, LARGEST)), metavar="N", help=batch_help)
    trials_help = "number of plans to run for some real updates (default: 3)"
    parser.add_argument("--trials", type=arg_type(count(1, 100)), metavar="N", help=trials_help)
    rows_help = "rows of an application's sample on each rank (default: 32, or 8 for large images and text)"
    parser.add_argument("--batch", type=arg_type(count(1, LARGEST)), metavar="N", help=rows_help)
    parser.add_argument("--out", type=arg_type(file(".json")), metavar="plan.json", help="write the plan to this file")
    estimate_help = "estimate the memory of training instead, in seconds, without running or measuring anything"
    parser.add_argument("--estimate", action="store_true", help=estimate_help)
    strategy_help = "a strategy file: the parts it switches on are kept, and the rest is planned around them"
    parser.add_argument(
        "--strategy", type=arg_type(readable(".json", ".yaml", ".yml")), metavar="strategy.yaml", help=strategy_help
    )
    parser.add_argument("--what-if", metavar="NAME=VALUE,...", help=f"any of {', '.join(CHANGES)}")
    parser.add_argument(
        "--chart", type=arg_type(file(".png", ".svg")), metavar="time.png", help="draw the time of an update by number of ranks"
    )


def require_target(text: str) -> None:
    if text not in APPLICATIONS and ":" not in text and not text.endswith(".json"):
        raise ConfigError(
            f"{text!r} is no target. Give one of {', '.join(APPLICATIONS)}, or module:function, or a plan that ends in .json."
            f"{did_you_mean(text, APPLICATIONS)}"
        )


def run(options: argparse.Namespace) -> int:
    require_target(options.target)
    if options.estimate:
        from .estimating import run_estimate  # late, as below

        run_estimate(options)
        return 0
    changes = {} if options.what_if is None else settings("--what-if", options.what_if, CHANGES)
    from .planning import run_plan  # late: it imports torch, and usage errors should come at once

    run_plan(options, changes)
    return 0

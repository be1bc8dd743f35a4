"""`fleetx plan TARGET`: its flags. What they lead to is in planning.py, which imports torch, and so comes late."""

from __future__ import annotations

import argparse

from fleetx.cli.flags import bandwidth, count, duration, file, memory, of, readable, settings
from fleetx.errors import ConfigError, did_you_mean

HELP = "measure a model on this machine, and say which strategy to train it with, and why"
APPLICATIONS = ("Resnet20", "Resnet50", "VGG16", "Bert_base", "Bert_large")
RISKS = ("exact", "rounding", "lossy", "schedule")
LARGEST = 10**9
CHANGES = {"bandwidth": bandwidth(), "latency": duration(), "world": count(1, 10**6), "memory": memory()}

TEXT = f"""\
Measure a model on this machine, choose the strategy to train it with, and say why.

TARGET is one of
  an application     {", ".join(APPLICATIONS)}, with random data
  module:function    from the working folder; the function takes nothing and returns
                     (model, optimizer, sample) or (model, optimizer, sample, loss_fn)
  plan.json          a plan that --out has written: nothing is measured
"""
EXAMPLES = """\
examples:
  fleetx plan Resnet20 --batch 64 --out plan.json
  fleetrun --nproc_per_node 2 -m fleetx.cli plan train:make --risk lossy     (several ranks, and the link between them)
  fleetx plan plan.json --what-if bandwidth=10Gbit,latency=50us,world=64,memory=32GB --chart step_time.png

--what-if changes the link of each rank (bandwidth, latency), the number of ranks (world) or the memory of each, and predicts
what would be chosen there. With a change of the link or of the ranks, or with --chart, the time of an update is shown for 2
to 4096 ranks.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TEXT, EXAMPLES
    parser.add_argument("target", metavar="TARGET", help="what to plan for")
    risk_help = "how far a strategy may go from plain training: %(choices)s (default: rounding)"
    parser.add_argument("--risk", choices=RISKS, metavar="RISK", help=risk_help)
    parser.add_argument("--memory", type=of(memory()), metavar="32GB", help="peak to keep to (default: what the device has)")
    batch_help = "samples of one update of all ranks (default: what one sample on each makes)"
    parser.add_argument("--global-batch", type=of(count(1, LARGEST)), metavar="N", help=batch_help)
    trials_help = "plans that are run for some real updates (default: 3)"
    parser.add_argument("--trials", type=of(count(1, 100)), metavar="N", help=trials_help)
    rows_help = "rows of an application's sample on each rank (default: 32, or 8 where they are large)"
    parser.add_argument("--batch", type=of(count(1, LARGEST)), metavar="N", help=rows_help)
    parser.add_argument("--out", type=of(file(".json")), metavar="plan.json", help="write the plan to this file")
    strategy_help = "a strategy: what it switches on is kept as it is, and the rest is planned around it"
    parser.add_argument("--strategy", type=of(readable(".json", ".yaml", ".yml")), metavar="strategy.yaml", help=strategy_help)
    parser.add_argument("--what-if", metavar="NAME=VALUE,...", help=f"any of {', '.join(CHANGES)}")
    parser.add_argument("--chart", type=of(file(".png", ".svg")), metavar="time.png", help="draw an update's time by ranks")


def require_target(text: str) -> None:
    if text not in APPLICATIONS and ":" not in text and not text.endswith(".json"):
        raise ConfigError(
            f"{text!r} is no target: that is one of {', '.join(APPLICATIONS)}, or module:function, or a plan that ends in .json."
            f"{did_you_mean(text, APPLICATIONS)}"
        )


def run(options: argparse.Namespace) -> int:
    require_target(options.target)
    changes = {} if options.what_if is None else settings("--what-if", options.what_if, CHANGES)
    from fleetx.cli.planning import run_plan  # late: it imports torch, for which a usage error need not wait

    run_plan(options, changes)
    return 0

"""A part that is switched on with settings at which it does nothing is named, once, by explain() and when training begins."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.strategies import catalogue
from fleetx.strategy import DistributedStrategy
from tests.helpers.harness import run_ranks

MERGE = 'gradient_merge has no effect with k_steps = 1. Write strategy.gradient_merge_configs = {"k_steps": 4}.'
LOCAL = (
    "localsgd saves nothing with k_steps = 1: weights are averaged after every update. "
    'Write strategy.localsgd_configs = {"k_steps": 4}.'
)
SAID: list[tuple[str, dict[str, Any], str]] = [
    ("gradient_merge", {}, MERGE),
    ("gradient_merge", {"avg": False}, MERGE),
    ("localsgd", {}, LOCAL),
    ("localsgd", {"begin_step": 100}, LOCAL),
    (
        "adaptive_localsgd",
        {"max_k_steps": 1},
        "adaptive_localsgd saves nothing with max_k_steps = 1: weights are averaged after every update. "
        'Write strategy.adaptive_localsgd_configs = {"max_k_steps": 16}.',
    ),
    (
        "dgc",
        {"sparsity": [0.0]},
        'dgc has no effect with a sparsity of 0: every update is dense. Write strategy.dgc_configs = {"sparsity": [0.999]}.',
    ),
]
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("gradient_merge", {"k_steps": 2}),
    ("localsgd", {"k_steps": 2}),
    ("localsgd", {"outer_momentum": 0.9}),
    ("localsgd", {"across_nodes_every": 8}),
    ("localsgd", {"wire_dtype": "bfloat16"}),
    ("adaptive_localsgd", {}),
    ("dgc", {"sparsity": [0.0, 0.999]}),
]


def lines(name: str, configs: dict[str, Any]) -> list[str]:
    settings = {name: True} | ({f"{name}_configs": configs} if configs else {})
    return DistributedStrategy(**settings).explain().split("\n")


@pytest.mark.parametrize(("name", "configs", "said"), SAID)
def test_explain_says_that_a_part_does_nothing_and_what_to_write(name: str, configs: dict[str, Any], said: str) -> None:
    assert lines(name, configs).count(said) == 1


@pytest.mark.parametrize(("name", "configs"), SILENT)
def test_explain_says_nothing_of_a_part_that_does_something(name: str, configs: dict[str, Any]) -> None:
    assert not any("no effect" in line or "saves nothing" in line for line in lines(name, configs))


@pytest.mark.parametrize(("name", "configs", "said"), SAID)
def test_the_line_to_write_gives_the_part_an_effect(name: str, configs: dict[str, Any], said: str) -> None:
    target, written = said.split(" Write strategy.")[1].rstrip(".").split(" = ")
    assert target == f"{name}_configs"
    (part,) = DistributedStrategy(**{name: True, target: json.loads(written)}).parts()
    assert part.no_effect() is None


@pytest.mark.parametrize("name", [name for name in catalogue() if name not in ("gradient_merge", "localsgd")])
def test_every_other_part_does_something_at_its_defaults(name: str) -> None:
    assert catalogue()[name]().no_effect() is None


def _said_at_the_start(rank: int) -> list[str]:
    model = nn.Linear(4, 2)
    strategy = fleet.DistributedStrategy(gradient_merge=True, localsgd=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    return [line for line in out.getvalue().split("\n") if line in (MERGE, LOCAL)]


def test_worker_0_alone_says_it_below_the_overview() -> None:
    assert run_ranks(_said_at_the_start, 2) == [[MERGE, LOCAL], []]

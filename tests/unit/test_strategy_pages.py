"""One page for each strategy: complete, and saying what the code says, so that it cannot rot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.engine.slots import Part, Slot
from fleetx.errors import FleetError, FleetWarning
from fleetx.strategies import catalogue
from tests.helpers.documents import ROOT, Block, read_blocks
from tests.helpers.harness import run_ranks
from tests.helpers.quoted import is_said, plain, reads_as

PARTS = catalogue()
AVAILABLE = list(PARTS)
FOLDER = ROOT / "docs" / "strategies"
HEADINGS = [
    "The lines to write",
    "What it does to the step",
    "Formula",
    "Keys",
    "When it helps, when it hurts",
    "Cost",
    "What it refuses",
    "Neutral setting",
    "Differences from Paddle Fleet",
    "Reference",
]


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Without its heading."""
    parts = re.split(r"^## (.+)$", page(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading].strip()


def quotations(name: str) -> list[str]:
    """Of what it refuses, and warns of."""
    return [block.text for block in read_blocks(section(name, "What it refuses")) if block.language == "text"]


# --- complete -----------------------------------------------------------------------------------------------------------


def test_every_available_strategy_has_a_page_and_every_page_a_strategy() -> None:
    assert {file.stem for file in FOLDER.glob("*.md")} == set(AVAILABLE)


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_page_has_all_the_headings_in_order_and_nothing_empty(name: str) -> None:
    text = page(name)
    assert re.findall(r"^# (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE) == [
        f"`{name}`"
    ]
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == HEADINGS
    assert all(section(name, heading) for heading in HEADINGS)
    said_first = plain(text.split("\n## ")[0].split("\n", 1)[1])
    assert re.fullmatch(r"[A-Z\[].*[a-z)]\.", said_first) and ". " not in said_first, f"one sentence first, not: {said_first}"


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_page_has_lines_to_write_that_switch_the_strategy_on(name: str) -> None:
    code = "".join(block.text for block in read_blocks(section(name, "The lines to write")) if block.language == "python")
    assert re.search(rf"\b{name} ?= ?True", code)


# --- as the code has it -------------------------------------------------------------------------------------------------


def key_table(part: type[Part]) -> list[str]:
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(part):
        default = repr(getattr(part(), field.name)).replace("'", '"')
        rows.append(f"| `{field.name}` | `{default}` | {field.metadata['kind'].allowed} | {field.metadata['doc']} |")
    return rows


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_table_of_keys_is_that_of_the_code(name: str) -> None:
    said = section(name, "Keys")
    if dataclasses.fields(PARTS[name]):
        assert said.splitlines() == [f"`strategy.{name}_configs`:", "", *key_table(PARTS[name])]
    else:
        assert said == f"None: `strategy.{name} = True` is all there is."


def claimed(name: str) -> set[Slot]:
    """With any settings."""
    part = PARTS[name]
    return set(part().claims()) | (set(part(dtype="float16").claims()) if name == "amp" else set())  # type: ignore[call-arg]


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_page_names_the_slots_and_the_risk(name: str) -> None:
    first = plain(section(name, "What it does to the step").split("\n\n")[0])
    claims, risk = re.fullmatch(r"Claims (.*?)\. Risk: `(\w+)`.*\.", first).groups()  # type: ignore[union-attr]
    assert set(re.findall(r"`(\w+)`", claims)) == {slot.value for slot in claimed(name)}
    assert claims.startswith("no slot") == (not claimed(name))
    assert risk == PARTS[name].risk_class.value


@pytest.mark.parametrize("name", [name for name in AVAILABLE if name != "auto"])
def test_a_page_names_the_strategies_that_it_does_not_go_with(name: str) -> None:
    first = section(name, "What it refuses").split("\n\n")[0]
    listed = re.match(r"Not together with: (.*?)\.", plain(first))
    assert listed is not None
    others = {other for other in PARTS if other not in (name, "auto") and claimed(name) & claimed(other)}
    assert set(re.findall(r"`(\w+)`", listed[1])) == others
    assert listed[1].startswith("nothing") == (not others)


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_page_says_the_neutral_setting(name: str) -> None:
    said = section(name, "Neutral setting")
    neutral = PARTS[name].neutral()
    if neutral is None:
        assert said.startswith("None: ")
    else:
        setting = re.match(r"`(\{.*?\})`: ", said)
        assert setting is not None and json.loads(setting[1]) == neutral


@pytest.mark.parametrize("name", AVAILABLE)
def test_measured_figures_are_in_the_pages_that_are_linked(name: str) -> None:
    for bullet in re.split(r"^- ", section(name, "When it helps, when it hurts"), flags=re.MULTILINE)[1:]:
        linked = re.findall(r"\]\(\.\./(\w+\.md)\)", bullet)
        measured = " ".join((ROOT / "docs" / file).read_text(encoding="utf-8") for file in linked)
        known = set(re.findall(r"\d[\d,]*\.\d+", measured))
        figures = set(re.findall(r"\d[\d,]*\.\d+", re.sub(r"`[^`]*`|\]\([^)]*\)", "", bullet)))
        if linked and "large_batch_guide.md" not in linked:
            assert figures <= known, f"{sorted(figures - known)} in no figure of {linked}: {bullet}"


def test_the_figures_of_outer_optimizers_are_those_of_the_measurement() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "outer_optimizer.json").read_text(encoding="utf-8"))["rows"].values()
    known = {f"{row['accuracy_mean']:.1f}" for row in rows} | {f"{row['held_out_mean']:.3f}" for row in rows}
    table = re.findall(r"^    \|.*\| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|$", page("localsgd"), flags=re.MULTILINE)
    assert len(table) == 9 and {figure for row in table for figure in row} <= known


def test_the_guides_figures_are_those_of_the_measurement() -> None:
    guide = (ROOT / "docs" / "large_batch_guide.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "large_batch.md").read_text(encoding="utf-8")
    [told] = re.findall(r"^## What was measured\n(.*?)^## ", guide, flags=re.MULTILINE | re.DOTALL)
    figures = set(re.findall(r"\d+\.\d+", told))
    assert len(figures) > 10 and figures <= set(re.findall(r"\d+\.\d+", measured))


# --- what it refuses ----------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(16), nn.Linear(16, 4))


def strategy(name: str, configs: dict[str, Any] | None = None, **others: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy(**{name: True}, **others)
    if configs:
        setattr(made, f"{name}_configs", configs)
    return made


def distribute(
    name: str, configs: dict[str, Any] | None = None, *, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **given: Any
) -> Any:
    others = {key: given.pop(key) for key in ("sample", "loss_fn") if key in given}
    settings = given.pop("others", {})
    model = net()
    if kind is torch.optim.SGD:
        given = {"momentum": 0.9} | given
    return fleet.distribute(model, kind(model.parameters(), lr=0.1, **given), strategy(name, configs, **settings), **others)


def bare(name: str, configs: dict[str, Any] | None = None) -> None:
    model, optimizer = distribute(name, configs)
    model(torch.randn(2, 3, 16)).square().mean().backward()
    optimizer.step()


def used(name: str, kind: type[torch.optim.Optimizer], **given: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, **given)
    model(torch.randn(2, 3, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.distribute(model, optimizer, strategy(name))


def tight_budget() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    model, x = nn.Sequential(*blocks), torch.randn(2048, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    asked = strategy("recompute", {"budget": "1MB"})
    fleet.distribute(model, optimizer, asked, sample=x, loss_fn=lambda model, batch: model(batch).square().mean())


def weighed_sum() -> None:
    model, optimizer = distribute("gradient_merge", {"k_steps": 2, "avg": False})
    optimizer.minimize(model(torch.randn(2, 3, 16)).square().mean(), weight=2)


def inside_averaged() -> None:
    model, optimizer = distribute("localsgd", {"k_steps": 2, "outer_momentum": 0.9})
    with optimizer.averaged():
        optimizer.pipeline.stages.average._showing_mean = True  # one rank alone has no other mean to show
        optimizer.minimize(model(torch.randn(2, 3, 16)).square().mean())


def compressing_in_vain(name: str, model: nn.Module | None = None) -> None:
    """Told on the console, without an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4)) if model is None else model
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy(name))


MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "noise_scale_steps": 10}
SAMPLE = {"sample": torch.randn(4, 3, 16), "loss_fn": lambda model, batch: model(batch).square().mean()}
SGD, AdamW, Adam = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam
REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("amp", lambda: distribute("amp", {"custom_black_list": ["LayerNrom"]})),
    ("amp", lambda: bare("amp", {"dtype": "float16"})),
    ("recompute", lambda: distribute("recompute", {"checkpoints": ["0.layer.*"]})),
    ("recompute", lambda: distribute("recompute", {"checkpoints": ["0.layers"]})),
    ("recompute", lambda: distribute("recompute", {"checkpoints": ["0", "0.layers.0"]})),
    ("recompute", lambda: distribute("recompute", {"budget": "24MB"})),
    ("recompute", tight_budget),
    ("compile", lambda: distribute("compile", {"mode": "reduce-overhead"})),
    ("gradient_merge", weighed_sum),
    ("clip_norm", lambda: distribute("clip_norm", {"max_norm": 0})),
    ("lars", lambda: distribute("lars", kind=AdamW)),
    ("lars", lambda: distribute("lars", momentum=0.0)),
    ("lars", lambda: distribute("lars", nesterov=True)),
    ("lars", lambda: distribute("lars", weight_decay=0.0005)),
    ("lars", lambda: used("lars", SGD, momentum=0.9)),
    ("lars", lambda: distribute("lars", {"exclude_from_weight_decay": ["bn"]})),
    ("lars", lambda: distribute("lars", {"carry_norms": True})),
    ("lamb", lambda: distribute("lamb")),
    ("lamb", lambda: distribute("lamb", kind=AdamW)),
    ("lamb", lambda: distribute("lamb", kind=Adam, amsgrad=True)),
    ("lamb", lambda: used("lamb", AdamW, weight_decay=0)),
    ("lamb", lambda: distribute("lamb", {"lamb_weight_decay": 0}, kind=Adam)),
    ("muon", lambda: distribute("muon")),
    ("muon", lambda: used("muon", AdamW)),
    ("muon", lambda: distribute("muon", {"exclude": ["atn"]}, kind=AdamW)),
    ("muon", lambda: distribute("muon", {"exclude": ["head", "weight"]}, kind=AdamW)),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "overlap_steps": 5})),
    ("localsgd", lambda: distribute("localsgd", {"outer_nesterov": True})),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "overlap_steps": 2, "average_state": True})),
    ("localsgd", lambda: distribute("localsgd", {"wire_dtype": "int8", "top_k": 64})),
    ("localsgd", lambda: distribute("localsgd", {"value_bits": 2})),
    ("localsgd", lambda: distribute("localsgd", {"error_decay": 0.95})),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "fragments": 5})),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "fragments": 2, "overlap_steps": 3})),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "fragments": 2, "average_state": True})),
    ("localsgd", lambda: distribute("localsgd", {"k_steps": 4, "fragments": 2, "across_nodes_every": 2})),
    ("localsgd", lambda: distribute("localsgd", others=MERGED)),
    ("localsgd", inside_averaged),
    ("adaptive_localsgd", lambda: bare("adaptive_localsgd")),
    ("adaptive_localsgd", lambda: distribute("adaptive_localsgd", {"overlap_steps": 20})),
    ("dgc", lambda: distribute("dgc", kind=AdamW)),
    ("dgc", lambda: distribute("dgc", dampening=0.1)),
    ("dgc", lambda: strategy("dgc", {"sparsity": [0.999, 0.75]})),
    ("dgc", lambda: compressing_in_vain("dgc")),
    ("powersgd", lambda: distribute("powersgd", others=MERGED)),
    ("powersgd", lambda: compressing_in_vain("powersgd")),
    ("quantized_allreduce", lambda: strategy("quantized_allreduce", {"bits": 6})),
    ("quantized_allreduce", lambda: distribute("quantized_allreduce", others=MERGED)),
    ("quantized_allreduce", lambda: compressing_in_vain("quantized_allreduce", nn.LayerNorm(16))),
    (
        "auto",
        lambda: distribute(
            "auto", {"global_batch": 10}, others={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}, **SAMPLE
        ),
    ),
    (
        "auto",
        lambda: distribute(
            "auto", {"memory": "20MB"}, others={"recompute": True, "recompute_configs": {"budget": "24MB"}}, **SAMPLE
        ),
    ),
    ("auto", lambda: distribute("auto", others={"localsgd": True, "clip_norm": True})),
    ("auto", lambda: distribute("auto")),
    ("auto", lambda: fleet.distributed_optimizer(*_waiting_for_auto())),
]


def _waiting_for_auto() -> tuple[torch.optim.Optimizer, fleet.DistributedStrategy]:
    model = fleet.distributed_model(net())
    _waiting_for_auto.model = model  # type: ignore[attr-defined]  # a model without a reference is forgotten
    return SGD(model.parameters(), lr=0.1), strategy("auto")


@pytest.mark.parametrize(("name", "provoke"), REFUSALS, ids=[f"{name}-{place}" for place, (name, _) in enumerate(REFUSALS)])
def test_a_refusal_reads_as_the_page_has_it(
    name: str, provoke: Callable[[], Any], alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FleetWarning)
        if name == "amp":
            warnings.simplefilter("ignore", FleetWarning)  # a slow CPU
        try:
            provoke()
            messages = capsys.readouterr().out.splitlines()
        except (FleetError, FleetWarning) as error:
            messages = [str(error)]
    figures = [
        re.sub(r"[\d.]+ MiB|\d{6,}", "…", quoted) if "no plan keeps to it" in quoted else quoted for quoted in quotations(name)
    ]
    assert any(reads_as(quoted, message) for quoted in figures for message in messages), "\n".join(messages)


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_refusal_quoted_is_in_the_source(name: str) -> None:
    for quoted in quotations(name):
        conflict = re.match(r"(\w+) and (\w+) both claim ", quoted)
        if conflict is not None:
            said = fleet.DistributedStrategy(**dict.fromkeys(conflict.groups(), True)).explain()
            assert f"Conflict: {plain(quoted)}" in said.splitlines()
        else:
            assert is_said(quoted), f"no message says: {plain(quoted)}"


# --- bytes --------------------------------------------------------------------------------------------------------------

SMALL, LARGE = 256 + 64, 2 * 64 * 256
TOLD_BYTES = 256
"""Flags of an update, and at an averaging one row of numbers."""


def _network(name: str) -> nn.Module:
    middle: nn.Module = nn.BatchNorm1d(256, affine=False, track_running_stats=False) if name == "sync_batch_norm" else nn.ReLU()
    return nn.Sequential(nn.Linear(64, 256), middle, nn.Linear(256, 64))


def _sent(rank: int, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, int]:
    """Bytes of updates 6 to 9, in which each of these has a whole cycle."""
    sent = {}
    for name, configs in cases:
        torch.manual_seed(0)
        model = _network(name)
        asked = strategy(name, configs, desync_check_steps=0)
        model, optimizer = fleet.distribute(model, SGD(model.parameters(), lr=0.01, momentum=0.9), asked)
        torch.manual_seed(rank)
        steps = [optimizer.minimize(model(torch.randn(8, 64)).square().mean()).bytes_sent for _ in range(9)]
        sent[name] = sum(steps[5:])
    return sent


def cost_of(name: str, folder: Path) -> Callable[..., float]:
    """The function that the page has."""
    [block] = [block for block in read_blocks(section(name, "Cost")) if block.language == "python"]
    (folder / "cost.py").write_text(block.text)
    found: Callable[..., float] = runpy.run_path(str(folder / "cost.py"))["bytes_sent"]
    return found


def test_the_formulas_for_bytes_give_what_workers_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numel = SMALL + LARGE
    dense = 2 * (2 - 1) / 2 * numel * 4
    cases: dict[str, tuple[dict[str, Any], Callable[[Callable[..., float]], float]]] = {
        "bf16_allreduce": ({}, lambda cost: cost(numel, 2)),
        "fp16_allreduce": ({}, lambda cost: cost(numel, 2)),
        "gradient_merge": ({"k_steps": 4}, lambda cost: cost(numel, 2, 4)),
        "localsgd": ({"k_steps": 4}, lambda cost: cost(numel, 2, 4)),
        "dgc": ({"min_numel": 1000, "sparsity": [0.99]}, lambda cost: cost([64 * 256] * 2, SMALL, 2, 0.99)),
        "powersgd": ({"begin_step": 0}, lambda cost: cost([(256, 64), (64, 256)], SMALL, 2, 4)),
        "quantized_allreduce": ({"bits": 4}, lambda cost: cost(numel, SMALL, 2, 4)),
        "sync_batch_norm": ({}, lambda cost: dense + cost(256, 2)),
    }
    reported = run_ranks(_sent, 2, [(name, configs) for name, (configs, _) in cases.items()])
    for name, (_, expected) in cases.items():
        assert 4 * expected(cost_of(name, tmp_path)) == pytest.approx(reported[0][name], abs=4 * TOLD_BYTES), name
        assert reported[0] == reported[1]


def test_a_cost_is_worked_out_on_every_page() -> None:
    for name in AVAILABLE:
        blocks: list[Block] = read_blocks(section(name, "Cost"))
        assert any(block.language == "python" and block.output for block in blocks), name


def test_strategies_that_are_linked_have_pages() -> None:
    for name, other in itertools.product(AVAILABLE, AVAILABLE):
        assert f"]({other}.md)" not in page(name) or (FOLDER / f"{other}.md").exists()

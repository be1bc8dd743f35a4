"""Local SGD whose deltas are quantised, sparse or sent in fragments, against a simulation in NumPy: every rank, every update."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_compressed import Compressed, CompressedWorkers, integers, sparse
from tests.helpers.localsgd_runs import LR, Case, Trace, expected, loss_of, mean_over_ranks, net, on_nodes, rendezvous, train

EXACT = 1e-12
"""For float64: sums may be taken in another order, nothing else."""
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
SPARSE: dict[str, Any] = {"top_k": 3, "chunk": 8}
FIRST, SECOND = slice(0, 12), slice(12, 26)
"""Of the net's 26 parameters: its first tensor, and the other three."""


def local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


def assert_equals_simulation(traces: list[Trace], case: Case, rule: Compressed) -> None:
    wanted = expected(case, rule, ranks=len(traces), make=CompressedWorkers)
    for rank, trace in enumerate(traces):
        for update, (ours, theirs) in enumerate(zip(trace.weights, wanted.history, strict=True), start=1):
            np.testing.assert_allclose(ours, theirs[rank], rtol=0, atol=EXACT, err_msg=f"rank {rank}, update {update}")
        assert trace.averaged == wanted.averaged
        assert trace.periods == [None] * (rule.begin - 1) + [rule.k] * (case.updates - rule.begin + 1)


CASES: dict[str, tuple[Case, Compressed]] = {
    "int8": (Case(strategy=local(k_steps=3, wire_dtype="int8"), momentum=0.9), Compressed(k=3, encode=integers(8))),
    "int4 and an outer optimizer": (
        Case(strategy=local(k_steps=3, wire_dtype="int4", begin_step=2, **DILOCO), momentum=0.9),
        Compressed(k=3, begin=2, encode=integers(4), **OUTER),
    ),
    "int4, weighted": (
        Case(strategy=local(k_steps=2, wire_dtype="int4"), weighted=True), Compressed(k=2, encode=integers(4))
    ),
    "int8 with overlap and decay": (
        Case(strategy=local(k_steps=3, wire_dtype="int8", overlap_steps=2, error_decay=0.5), momentum=0.9),
        Compressed(k=3, overlap=2, encode=integers(8), decay=0.5),
    ),
    "int4, one overflow": (
        Case(strategy=local(k_steps=3, wire_dtype="int4") | {"on_nan_inf": "skip"}, bad=(1, 3)),
        Compressed(k=3, encode=integers(4)),
    ),
    "sparse": (Case(strategy=local(k_steps=2, **SPARSE), momentum=0.9), Compressed(k=2, encode=sparse(3, 8, 32))),
    "sparse, 8 bits": (
        Case(strategy=local(k_steps=2, value_bits=8, **SPARSE), weighted=True), Compressed(k=2, encode=sparse(3, 8, 8))
    ),
    "sparse, 4 bits": (Case(strategy=local(k_steps=2, value_bits=4, **SPARSE)), Compressed(k=2, encode=sparse(3, 8, 4))),
    "SparseLoCo": (
        Case(strategy=local(k_steps=2, value_bits=2, error_decay=0.95, **SPARSE), momentum=0.9, updates=16),
        Compressed(k=2, encode=sparse(3, 8, 2), decay=0.95),
    ),
    "SparseLoCo with overlap, weighted": (
        Case(strategy=local(k_steps=3, value_bits=2, error_decay=0.9, overlap_steps=3, **SPARSE), weighted=True),
        Compressed(k=3, overlap=3, encode=sparse(3, 8, 2), decay=0.9),
    ),
    "fragments": (
        Case(strategy=local(k_steps=4, fragments=2), momentum=0.9, updates=14), Compressed(k=4, parts=(FIRST, SECOND))
    ),
    "fragments of an odd period, overlapped, weighted, with an outer optimizer": (
        Case(strategy=local(k_steps=5, fragments=2, overlap_steps=2, **DILOCO), weighted=True, updates=17),
        Compressed(k=5, overlap=2, parts=(FIRST, SECOND), **OUTER),
    ),
    "fragments of SparseLoCo, overlapped": (
        Case(strategy=local(k_steps=4, fragments=2, overlap_steps=1, value_bits=2, error_decay=0.95, **SPARSE), updates=15),
        Compressed(k=4, overlap=1, parts=(FIRST, SECOND), encode=sparse(3, 8, 2), decay=0.95),
    ),
    "more fragments than two": (
        Case(strategy=local(k_steps=4, fragments=3, wire_dtype="int8"), updates=11),
        Compressed(k=4, parts=(slice(0, 12), slice(12, 16), slice(16, 26)), encode=integers(8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_the_simulation_after_every_update(name: str) -> None:
    case, rule = CASES[name]
    assert_equals_simulation(run_ranks(train, 2, case), case, rule)


OWNED: dict[str, tuple[Case, Compressed]] = {
    "int8": (Case(strategy=local(k_steps=2, wire_dtype="int8")), Compressed(k=2, encode=integers(8), owned=True)),
    "int4 with overlap, weighted, decaying": (
        Case(strategy=local(k_steps=4, wire_dtype="int4", overlap_steps=3, error_decay=0.9, **DILOCO), weighted=True, updates=15),
        Compressed(k=4, overlap=3, encode=integers(4), decay=0.9, owned=True, **OUTER),
    ),
    "int4 in fragments, overlapped": (
        Case(strategy=local(k_steps=4, wire_dtype="int4", fragments=2, overlap_steps=2), updates=13),
        Compressed(k=4, overlap=2, encode=integers(4), owned=True, parts=(FIRST, SECOND)),
    ),
    "sparse": (
        Case(strategy=local(k_steps=2, value_bits=2, error_decay=0.95, **SPARSE)),
        Compressed(k=2, encode=sparse(3, 8, 2), decay=0.95),
    ),
}


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", OWNED)
def test_with_more_ranks_the_sums_of_integers_are_encoded_once_more_by_their_owners(name: str, size: int) -> None:
    case, rule = OWNED[name]
    assert_equals_simulation(run_ranks(train, size, case), case, rule)


# --- equal bits, bytes, conservation --------------------------------------------------------------------------------------

WIDE = 256
"""Inputs and outputs of a layer of 65,536 weights: 16 chunks of 4,096, of two ranks one segment."""


def _rounds(rank: int, configs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDE, WIDE, bias=False)
    strategy = fleet.DistributedStrategy(**local(**configs), desync_check_steps=0)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), strategy)
    average, told = optimizer.pipeline.stages.average, []
    start = model.weight.detach().clone().double()
    for update in range(1, 8):
        torch.manual_seed(10 * update + rank)
        if update == 2:
            start = model.weight.detach().clone().double()  # the anchor
        report = optimizer.minimize(model(torch.randn(16, WIDE)).square().mean())
        kept = average.state_dict().get("shares", {}).get("weight", torch.zeros(1)).double()
        told.append({
            "averaged": report.averaged, "bytes": report.bytes_sent, "weight": model.weight.detach().clone(),
            "moved": model.weight.detach().double() - start, "kept": kept.clone(), "all kept": mean_over_ranks(kept) * size,
        })  # fmt: skip
    return told


BITS_SENT = {
    "int8": ({"wire_dtype": "int8"}, 8.2),
    "int4": ({"wire_dtype": "int4"}, 4.2),
    "SparseLoCo": ({"top_k": 64, "value_bits": 2, "error_decay": 0.95}, 0.2275),
    "64 of 4096, 8 bits": ({"top_k": 64, "value_bits": 8}, 0.32),
    "64 of 4096, 32 bits": ({"top_k": 64}, 0.69),
}


@functools.cache
def _bytes_of_rows(size: int) -> float:
    """What a round sends beside the deltas."""
    plain = run_ranks(_rounds, size, {"k_steps": 2}, size)
    return float(plain[0][2]["bytes"] - 2 * (size - 1) / size * 4 * WIDE**2)


@pytest.mark.parametrize("name", BITS_SENT)
@pytest.mark.parametrize("size", [2, 3])
def test_a_round_leaves_equal_bits_and_costs_so_many_bits_of_each_parameter(name: str, size: int) -> None:
    configs, most = BITS_SENT[name]
    ranks = run_ranks(_rounds, size, {"k_steps": 2, **configs}, size)
    of_rows = _bytes_of_rows(size)
    # A sparse round sends (N - 1) times its bytes, one of integers 2 (N - 1) / N times.
    times = size - 1 if "top_k" in configs else 2 * (size - 1) / size
    for update, told in enumerate(ranks[0], start=1):
        assert told["averaged"] == (update in (3, 5, 7))
        if told["averaged"]:
            bits = 8 * (told["bytes"] - of_rows) / WIDE**2 / times
            assert 0.98 * most - 0.1 < bits <= most
            for other in ranks[1:]:
                torch.testing.assert_close(other[update - 1]["weight"], told["weight"], rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("configs", [{"wire_dtype": "int4"}, {"top_k": 64, "value_bits": 2}], ids=["int4", "sparse"])
def test_what_was_sent_and_what_all_ranks_keep_is_what_they_have_moved_on_average(configs: dict[str, Any], size: int) -> None:
    """In the first round, from one anchor; in float32, whose sums round."""
    alone = run_ranks(_rounds, size, {"k_steps": 50}, size)
    moved = sum(told[2]["moved"] for told in alone) / size
    for told in run_ranks(_rounds, size, {"k_steps": 2, **configs}, size):
        assert told[2]["kept"].any()
        torch.testing.assert_close(told[2]["moved"] + told[2]["all kept"], moved, rtol=0, atol=2e-7)


# --- two levels -------------------------------------------------------------------------------------------------------------


def test_inside_a_node_deltas_are_dense_and_nothing_is_kept(tmp_path: Path) -> None:
    """Rounds after 3 (inside a node), 5 (all), 7 (inside)."""
    case = Case(strategy=local(k_steps=2, across_nodes_every=2, wire_dtype="int4", **DILOCO), updates=8)
    dense = Case(strategy=local(k_steps=2, across_nodes_every=2, **DILOCO), updates=8)
    nodes = (0, 0, 1, 1)
    ours = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), train, case)
    plain = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), train, dense)
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(mine.weights[:4], theirs.weights[:4])
        np.testing.assert_array_equal(mine.weights[4], ours[0].weights[4])
        assert not np.array_equal(mine.weights[4], theirs.weights[4])
        np.testing.assert_allclose(mine.weights[4], theirs.weights[4], rtol=0, atol=0.05)
    for first, second in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(ours[first].weights[6], ours[second].weights[6])


# --- average() and averaged() ---------------------------------------------------------------------------------------------


def _asked(rank: int, configs: dict[str, Any], after: int) -> dict[str, Any]:
    model = net()
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=LR), fleet.DistributedStrategy(**local(**configs))
    )
    for update in range(1, after + 1):
        optimizer.minimize(loss_of(model, rank, update))
    own = [param.detach().clone() for param in model.parameters()]
    means = [mean_over_ranks(param) for param in model.parameters()]
    with optimizer.averaged():
        inside = [param.detach().clone() for param in model.parameters()]
    back = [param.detach().clone() for param in model.parameters()]
    optimizer.average()
    averaged = [param.detach().clone() for param in model.parameters()]
    rounds = [optimizer.minimize(loss_of(model, rank, update)).averaged for update in range(after + 1, after + 10)]
    return {"own": own, "means": means, "inside": inside, "back": back, "averaged": averaged, "rounds": rounds}


FRAGMENTS = {"k_steps": 4, "fragments": 2, "overlap_steps": 1}
"""Turns after 3 (settled at 4), 5 (6), 7 (8), ..."""


@pytest.mark.parametrize("after", [3, 4, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_in_every_phase_averaged_shows_the_mean_and_average_makes_all_ranks_equal(after: int, size: int) -> None:
    for configs in (FRAGMENTS, FRAGMENTS | {"wire_dtype": "int4"}, {"k_steps": 2, "overlap_steps": 2, "wire_dtype": "int8"}):
        ranks = run_ranks(_asked, size, configs, after)
        for seen in ranks:
            torch.testing.assert_close(seen["inside"], seen["means"], rtol=0, atol=1e-12)
            torch.testing.assert_close(seen["back"], seen["own"], rtol=0, atol=0)
            torch.testing.assert_close(seen["averaged"], ranks[0]["averaged"], rtol=0, atol=0)
        if configs == FRAGMENTS:
            later = [update % 2 == 0 and update > after + 1 for update in range(after + 1, after + 10)]
            assert ranks[0]["rounds"] == later  # a turn that was under way has been settled by average()


# --- what is refused --------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> list[str]:
    def told(**configs: Any) -> str:
        model = net()
        strategy = fleet.DistributedStrategy(**local(**configs))
        return raised(lambda: fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), strategy))

    return [
        told(k_steps=4, wire_dtype="int8", top_k=64),
        told(k_steps=4, top_k=100, chunk=64),
        told(k_steps=4, value_bits=2),
        told(k_steps=4, wire_dtype="int8", chunk=64),
        told(k_steps=4, error_decay=0.95),
        told(k_steps=4, fragments=5),
        told(k_steps=8, fragments=5),
        told(k_steps=4, fragments=2, overlap_steps=3),
        told(k_steps=4, fragments=2, average_state=True),
        told(k_steps=4, fragments=2, across_nodes_every=2),
    ]


REFUSED = (
    'wire_dtype"] is "int8" and top_k is 64: what is sparse travels as values of value_bits. Write value_bits = 8',
    'top_k"] is 100, and a chunk has 64 entries. Write at most 64',
    'value_bits"] is 2, a setting of top_k, which is None. Write a top_k, such as 64, or leave value_bits out.',
    'chunk"] is 64, a setting of top_k, which is None.',
    'error_decay"] is 0.95, and nothing is kept back: wire_dtype is "float32" and top_k None. Write wire_dtype "int8" or "int4"',
    'fragments"] is 5, and a period has 4 updates (k_steps), of which each takes one turn. Write at most 4.',
    'fragments"] is 5, and this model trains 4 tensors, which are not cut. Write at most 4.',
    'fragments"] is 2, so that a turn begins after 2 updates, and overlap_steps is 3. Write an overlap_steps of at most 2.',
    "fragments\"] is 2: average_state averages the optimizer's state as a whole. Write average_state=False, or fragments=1.",
    'fragments"] is 2, and across_nodes_every 2: inside a node the whole model is averaged. Write across_nodes_every=1',
)


def test_settings_that_contradict_each_other_are_refused_on_all_ranks_alike() -> None:
    first, second = run_ranks(_refusals, 2)
    assert first == second
    for text, part in zip(first, REFUSED, strict=True):
        assert text.startswith('ConfigError: localsgd_configs["' + part)


@pytest.mark.parametrize(
    ("configs", "told"),
    [
        ({"wire_dtype": "int8"}, "on two ranks a round sends 8.06 bits of each parameter, 4 times fewer than float32"),
        ({"top_k": 64, "value_bits": 2, "error_decay": 0.95}, "sends 0.22 bits of each parameter, 144 times fewer than float32"),
        ({"top_k": 64, "value_bits": 2, "error_decay": 0.95}, "what it misses is kept and sent later, less 5% a round."),
        (
            {"outer_momentum": 0.9},
            "outer_lr 1 with outer_momentum 0.9 goes up to 10 times as far as the average of the ranks.",
        ),
        ({"outer_momentum": 0.5}, "outer_lr 1 with outer_momentum 0.5 goes up to 2 times as far as the average of the ranks."),
    ],
)
def test_explain_says_how_many_bits_travel_and_how_far_the_outer_optimizer_goes(configs: dict[str, Any], told: str) -> None:
    assert told in " ".join(fleet.DistributedStrategy(**local(k_steps=30, **configs)).explain().split())

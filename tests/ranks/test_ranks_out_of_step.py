"""Guards ranks that skip, drop or add a step, or change weights, alone: they are named with their place, and nothing hangs."""

from __future__ import annotations

import contextlib
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetx import fleet
from fleetx.dist import comm, world
from tests.helpers.ddp_loops import STEPS, loss_of, make_pair, ours, plain_loop, rows, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.launchers import SOURCE, launchers
from tests.helpers.models import mlp


def _drifting(rank: int) -> str:
    """A step that goes past everything: the class's own, called by hand."""
    model, optimizer = make_pair()

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            with torch.no_grad():
                model[0].weight.add_(0.1 * rank)
            optimizer.step()
            optimizer.zero_grad()

    return raised(train)


def test_ranks_that_drift_apart_are_seen_after_the_first_update() -> None:
    for message in run_ranks(_drifting, 2):
        assert message.startswith("FleetError: after update 1 the ranks no longer hold the same model"), message


def _skipping_alone(rank: int) -> str:
    model, optimizer = make_pair(desync_check_steps=0)

    def train() -> None:
        for step in range(4):
            loss_of(model, rank, step).backward()
            if not (rank == 1 and step == 1):
                optimizer.step()
            for p in model.parameters():
                p.grad = None

    return raised(train)


def test_a_rank_that_skips_a_step_alone_is_named_with_its_place() -> None:
    for message in run_ranks(_skipping_alone, 2):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert "rank 0: backward 1 of update 3" in message and "rank 1: backward 2 of update 2" in message


def _dropping_alone(rank: int, which: str) -> str:
    model, optimizer = make_pair(desync_check_steps=0)

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if which == "backward" and rank == 1 and step == 1:
                loss_of(model, rank, step).backward()
            if not (which == "step" and rank == 1 and step == 1):
                optimizer.step()

    return raised(train)


@pytest.mark.parametrize(
    ("which", "first", "second"),
    [
        ("step", "rank 0: backward 1 of update 3; ", "rank 1: backward 1 of update 3, 1 dropped by zero_grad() so far"),
        ("backward", "rank 0: backward 1 of update 3; ", "rank 1: backward 2 of update 2"),
    ],
)
def test_a_rank_that_drops_a_step_or_makes_one_more_backward_is_named_also_by_zero_grad(
    which: str, first: str, second: str
) -> None:
    for message in run_ranks(_dropping_alone, 2, which):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert first in message and second in message, message


def _skips_first(rank: int) -> str:
    model, optimizer = make_pair()

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            if not (rank == 1 and step == 0):
                optimizer.step()
            for p in model.parameters():
                p.grad = None

    return raised(train)


def test_a_rank_that_skips_the_very_first_step_is_named_and_hangs_no_other() -> None:
    for message in run_ranks(_skips_first, 2):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message


def _changed_by_hand(rank: int, zeroing: str, drifts: bool) -> None:
    model, optimizer = make_pair()
    for step in range(3 if drifts else 12):
        (optimizer if zeroing == "optimizer" else model).zero_grad()
        loss_of(model, rank, step).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1 * (1 + rank * drifts))


def _drifting_by_hand(rank: int, zeroing: str) -> list[str]:
    return [raised(lambda: _changed_by_hand(rank, zeroing, False)), raised(lambda: _changed_by_hand(rank, zeroing, True))]


@pytest.mark.parametrize("zeroing", ["model", "optimizer"])
def test_ranks_whose_weights_are_changed_by_hand_are_compared_too(zeroing: str) -> None:
    where = "backward 2 of update 1" if zeroing == "model" else "backward 1 of update 2"
    for alike, apart in run_ranks(_drifting_by_hand, 2, zeroing):
        assert alike == "nothing raised"
        assert apart.startswith(f"FleetError: after {where}") and "the ranks no longer hold the same model" in apart, apart


def _unfrozen_on_one(rank: int) -> list[str]:
    limit, comm.SECONDS_BEFORE_WARNING = comm.SECONDS_BEFORE_WARNING, 0.2
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=3))
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        for p in model[2].parameters():
            p.requires_grad_(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told = raised(lambda: loss_of(model, rank, 1).backward())
    comm.SECONDS_BEFORE_WARNING = limit
    return [told, *(str(warning.message) for warning in seen)]


def test_a_rank_that_unfreezes_alone_names_the_others_instead_of_waiting_for_ever() -> None:
    first, second = run_ranks(_unfrozen_on_one, 2)
    assert "rank 0 waits for rank 1, which added or unfroze no parameters" in first[1]
    assert "which added or unfroze no parameters before this update" in first[0], first
    assert second[0] != "nothing raised"


def _one_backward_fewer(rank: int, spelling: str) -> str:
    """The last difference: a batch that one rank skips, and a loop that goes on after errors of its own."""
    model, optimizer = make_pair()

    def train() -> None:
        for step in range(4):
            if rank == 1 and step == 1:
                continue
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            with contextlib.suppress(RuntimeError):
                loss.backward() if spelling == "bare" else optimizer.backward(loss)
            optimizer.step()

    return raised(train)


@pytest.mark.parametrize("spelling", ["bare", "optimizer.backward"])
def test_a_rank_that_waits_for_a_backward_that_no_other_makes_says_who_left_and_is_no_runtime_error(spelling: str) -> None:
    waiting, gone = run_ranks(_one_backward_fewer, 2, spelling)
    start = "PeerError: rank 1 made 3 updates and left; rank 0 waits in its 4th (backward 1 of update 4). "
    assert waiting.startswith(start), waiting
    assert "fleet.sampler(data)" in waiting
    assert gone == "nothing raised"


ONE_BATCH_FEWER = f"""
import os, sys
sys.path.insert(0, {str(SOURCE)!r})
import torch
from fleetx import fleet
fleet.init()
model = torch.nn.Linear(2, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3 if fleet.worker_index() == 1 else 4):
    optimizer.minimize(model(torch.ones(2, 2)).sum())
    if step == 2 and fleet.worker_index() == 1 and "fails" in os.environ.get("CASE", ""):
        raise ValueError("a row of 3 values")
"""


@pytest.mark.parametrize(("case", "end"), [("ends", "left"), ("fails", "ended with ValueError: a row of 3 values")])
def test_all_ranks_that_wait_say_which_one_left_after_how_many_updates(tmp_path: Path, case: str, end: str) -> None:
    """On four ranks: two of those that wait have no connection to the one that left."""
    with launchers() as fleetruns:
        run = fleetruns.start(tmp_path, ONE_BATCH_FEWER, "--nproc_per_node=4", CASE=case, OMP_NUM_THREADS="1")
        assert run.wait() != 0, run.told
    logs = [run.log(rank) for rank in (0, 2, 3)]
    told = [log for log in logs if "PeerError" in log]
    assert told, run.told
    for rank, log in zip((0, 2, 3), logs, strict=True):
        if log in told:
            assert f"rank 1 made 3 updates and {end}; rank {rank} waits in its 4th (backward 1 of update 4)." in log, log
    if case == "ends":
        assert "rank 1 made 3 updates and left; rank " in " ".join(run.told.split()), run.told
    else:
        assert "ValueError: a row of 3 values" in run.told


def _leaves_first(rank: int) -> list[str]:
    """Ranks of a ring whose neighbours are still there learn it from the notes, not from a broken connection."""
    comm.PIECE = timedelta(seconds=0.2)
    group = world.current().comm
    group.barrier()
    if rank == 1:
        comm.post_departure()
        while group.read_notes(["told/0", "told/2"]) is None:  # its connections stay
            pass
        return []
    told = [raised(group.barrier)]
    group.post_note(f"told/{rank}", "")
    return told


def test_a_wait_for_a_rank_that_has_left_ends_though_no_connection_broke() -> None:
    first, gone, third = run_ranks(_leaves_first, 3)
    assert gone == []
    for rank, (message,) in ((0, first), (2, third)):
        where = "a call before the first update"
        assert message.startswith(f"PeerError: rank 1 made 0 updates and left; rank {rank} waits in {where}. "), message


def _one_batch_more_before_a_call(rank: int, call: str) -> str:
    comm.PIECE = timedelta(seconds=0.5)
    model, optimizer = make_pair()
    calls = {"all_reduce": lambda: fleet.util.all_reduce(1.0), "barrier": fleet.barrier_worker}

    def train() -> None:
        for step in range(3 + rank):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        calls[call]()

    return raised(train)


@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_a_rank_in_backward_and_one_in_a_call_of_the_script_name_each_other_instead_of_mixing_their_bytes(call: str) -> None:
    for message in run_ranks(_one_batch_more_before_a_call, 2, call):
        assert message.startswith("PeerError: ranks wait for each other in different calls: rank 0 in fleet.util."), message
        assert "test_ranks_out_of_step.py:" in message and "before update 4; rank 1 in backward 1 of update 4." in message


def _second_model_left_out(rank: int, first_width: int, steps: int) -> str:
    """A GAN's trick: a rank whose second model is ahead leaves its update out, and the others do not."""
    comm.PIECE = timedelta(seconds=0.5)
    first, second = torch.nn.Linear(8, first_width).double(), torch.nn.Linear(8, 4).double()
    pairs = [fleet.distribute(model, sgd(model), small_buckets(desync_check_steps=0)) for model in (first, second)]

    def train() -> None:
        for step in range(steps + 2):
            for turn, (model, optimizer) in enumerate(pairs):
                if rank == 1 and step == steps and turn == 1:
                    continue
                optimizer.zero_grad()
                model(rows(rank, step)[0]).square().mean().backward()
                optimizer.step()

    return raised(train)


def test_first_backwards_of_a_model_on_some_ranks_alone_are_named_instead_of_waiting_for_ever() -> None:
    for message in run_ranks(_second_model_left_out, 2, 400, 0):
        assert message.startswith("PeerError: ranks wait for each other in different calls: "), message
        assert "rank 0 in backward 1 of update 1 of model 2; rank 1 in backward 1 of update 2." in message, message
        assert "a backward or a call stands under a condition" in message


def test_backwards_of_models_of_one_size_that_meet_are_told_instead_of_mixing_their_gradients() -> None:
    for message in run_ranks(_second_model_left_out, 2, 4, 2):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert "rank 0: backward 1 of update 3 of model 2; rank 1: backward 1 of update 4." in message, message


def _map_of_inputs(rank: int, local: bool) -> Any:
    """Rank 0 alone draws what the model looks at."""
    model, optimizer = make_pair(desync_check_steps=0)

    def train() -> None:
        for step in range(STEPS):
            if rank == 0 and step == 2:
                with fleet.no_sync() if local else contextlib.nullcontext():
                    x = rows(rank, step)[0].requires_grad_()
                    model(x).max().backward()
                    assert x.grad is not None
                optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    return raised(train), weights(model)


def test_a_backward_on_one_rank_alone_is_named_with_the_line_to_write_and_changes_nothing_when_local() -> None:
    for message, _ in run_ranks(_map_of_inputs, 2, False):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert "with fleet.no_sync()" in message
    plain = run_ranks(ours, 2, plain_loop)
    for (message, trained), (expected, _) in zip(run_ranks(_map_of_inputs, 2, True), plain, strict=True):
        assert message == "nothing raised"
        torch.testing.assert_close(trained, expected, rtol=0, atol=0)


def _slow_in_a_call(rank: int) -> float:
    comm.PIECE = timedelta(seconds=0.05)
    model, optimizer = make_pair()
    loss_of(model, rank, 0).backward()
    if rank == 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.wait(["fleetx/wait/0"])  # rank 0 has waited for so long that it has noted it
    optimizer.step()
    return fleet.util.all_reduce(1.0)


def test_a_rank_that_is_late_is_waited_for() -> None:
    assert run_ranks(_slow_in_a_call, 2) == [2.0, 2.0]


def _departures_of_an_earlier_group(rank: int) -> list[int]:
    group = world.current().comm
    comm.post_departure()
    while len(comm._departures()) < 2:
        pass
    group.barrier()
    counts = [len(comm._departures())]
    group.barrier()
    if rank == 0:
        comm.forget_departures()
    group.barrier()
    counts.append(len(comm._departures()))
    group.barrier()
    if rank == 1:
        comm.post_departure()
    group.barrier()
    counts.append(len(comm._departures()))
    group.barrier()  # before one of them leaves
    return counts


def test_what_ranks_have_left_of_an_earlier_group_is_forgotten_in_the_next() -> None:
    assert run_ranks(_departures_of_an_earlier_group, 2) == [[2, 0, 1]] * 2

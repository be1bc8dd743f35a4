"""A number that is not finite, or a rank that drifted away: one decision, on all ranks, with a name."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from fleetx import fleet
from fleetx.errors import FleetError, FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp

NAN, INF = float("nan"), float("inf")


def _poison(rank: int, mode: str, where: str, value: float, merged: int) -> dict[str, Any]:
    """Rank 1 meets `value` in the third update: in its input, in its loss alone, or in one gradient."""
    strategy = fleet.DistributedStrategy(on_nan_inf=mode)
    if merged > 1:
        strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": merged}
    model = cnn()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    told, skipped, states = [], [], []
    before = torch.empty(0)
    for micro in range(5 * merged):
        before = parameters_to_vector(model.parameters()).detach().clone()
        x, y = batch(10 * micro + rank, shape=(1, 6, 6))
        poisoned = rank == 1 and micro == 2 * merged
        if poisoned and where == "input":
            x[0, 0, 0, 0] = value
        loss = F.cross_entropy(model(x), y)
        if poisoned and where == "loss":
            loss = loss + value  # its gradients are finite
        if poisoned and where == "gradient":
            loss = loss + model[0].weight[0, 0, 0, 0].mul(0.0).sqrt()  # finite, with an infinite slope
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                report = optimizer.minimize(loss)
            except FleetError as error:
                told.append(str(error))
                break
        told += [str(warning.message) for warning in caught if issubclass(warning.category, FleetWarning)]
        skipped += [report.skipped] if report.due else []
        states.append(flat_state(model))
    after = parameters_to_vector(model.parameters()).detach().clone()
    momentum = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values() if s.get("momentum_buffer") is not None]
    return {
        "told": told,
        "skipped": skipped,
        "count": optimizer.skipped,
        "states": states,
        "parameters": (before, after),
        "finite": all(bool(t.isfinite().all()) for t in [*model.state_dict().values(), *momentum]),
    }


CASES = [("input", NAN), ("loss", NAN), ("loss", INF), ("gradient", INF)]


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize(("where", "value"), CASES)
def test_stop_raises_on_every_rank_in_that_step_with_the_weights_untouched(where: str, value: float, merged: int) -> None:
    ranks = run_ranks(_poison, 2, "stop", where, value, merged)
    for seen in ranks:
        (told,) = seen["told"]
        assert told.startswith("update 3 was not made: its loss or gradients are not finite.")
        assert ". The weights are as before," in told
        assert len(seen["skipped"]) == 2
        assert (f"Losses: {value} on rank 1." in told) == (where != "gradient")
        assert ("Losses: all finite." in told) == (where == "gradient")
        assert ("Gradients: all finite." in told) == (where == "loss")
        torch.testing.assert_close(*seen["parameters"], rtol=0, atol=0)
    assert ranks[0]["told"] == ranks[1]["told"]


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize(("where", "value"), CASES)
def test_skip_leaves_that_update_out_on_every_rank_and_goes_on(where: str, value: float, merged: int) -> None:
    ranks = run_ranks(_poison, 2, "skip", where, value, merged)
    for seen in ranks:
        assert seen["skipped"] == [False, False, True, False, False]
        assert seen["count"] == 1
        assert seen["finite"]
    assert len(ranks[0]["told"]) == 1 and "update 3 was skipped" in ranks[0]["told"][0] and not ranks[1]["told"]
    torch.testing.assert_close(ranks[0]["states"][-1], ranks[1]["states"][-1], rtol=0, atol=0)


def test_off_lets_it_pass_as_plain_torch_does() -> None:
    for seen in run_ranks(_poison, 2, "off", "input", NAN, 1):
        assert not seen["finite"] and not seen["told"] and seen["count"] == 0


def test_one_rank_alone_is_guarded_too(alone: None) -> None:
    model = mlp()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = flat_state(model)
    x, y = batch(0)
    with pytest.raises(FleetError, match="update 1 was not made.*Losses: nan on rank 0"):
        optimizer.minimize(F.cross_entropy(model(x * NAN), y))
    torch.testing.assert_close(flat_state(model), before, rtol=0, atol=0)
    optimizer.zero_grad()
    F.cross_entropy(model(x * NAN), y).backward()
    with pytest.raises(
        FleetError,
        match=r"update 2 was not made.*not seen after a bare loss.backward\(\); optimizer.backward\(loss\) names",
    ):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.minimize(F.cross_entropy(model(x), y)).updated


def _drift(rank: int, what: str, every: int) -> tuple[str, int]:
    strategy = fleet.DistributedStrategy(desync_check_steps=every)
    model = cnn()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    done = 0

    def train() -> None:
        nonlocal done
        for step in range(12):
            x, y = batch(10 * step + rank, shape=(1, 6, 6))
            optimizer.minimize(F.cross_entropy(model(x), y))
            done += 1
            if step == 5 and rank == 1:
                with torch.no_grad():
                    if what == "weight":
                        model[3].weight[0, 0, 0, 0] += 1e-6
                    if what == "negative zero":
                        model[8].bias[1] = -model[8].bias[1]

    return raised(train), done


@pytest.mark.parametrize(("what", "named"), [("weight", "3.weight"), ("negative zero", "8.bias")])
def test_a_weight_changed_on_one_rank_is_found_at_the_next_check_and_named(what: str, named: str) -> None:
    for told, done in run_ranks(_drift, 4, what, 4):
        assert told.startswith("FleetError: after update 8 the ranks no longer hold the same model. Unlike rank 0: rank 1 in ")
        assert named in told
        assert done == 8  # compared where the next update is reduced


@pytest.mark.parametrize(("what", "every"), [("nothing", 4), ("weight", 0)])
def test_equal_ranks_pass_and_the_check_can_be_switched_off(what: str, every: int) -> None:
    assert run_ranks(_drift, 2, what, every) == [("nothing raised", 12)] * 2


def _stopped(rank: int, signum: int, asked_rank: int) -> tuple[list[bool], int]:
    model = mlp()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    answers = []
    for step in range(8):
        x, y = batch(10 * step + rank)
        optimizer.minimize(F.cross_entropy(model(x), y))
        answers.append(fleet.should_stop())
        if step == 3 and rank == asked_rank:
            os.kill(os.getpid(), signum)
        if answers[-1]:
            break
    return answers, step


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("asked_rank", [0, 2])
def test_a_request_to_one_rank_stops_all_after_the_same_update(signum: int, asked_rank: int) -> None:
    for answers, step in run_ranks(_stopped, 3, signum, asked_rank):
        assert answers == [False] * 4 + [True]
        assert step == 4


def _stopped_without_a_pair(rank: int) -> tuple[bool, bool]:
    before = fleet.should_stop()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    fleet.barrier_worker()
    return before, fleet.should_stop()


def test_a_job_without_a_distributed_model_agrees_too() -> None:
    assert run_ranks(_stopped_without_a_pair, 2) == [(False, True)] * 2


def _overflow(rank: int) -> tuple[bool, list[bool]]:
    """Under float16 an overflow is the loss scale's business, whatever the guard says."""
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16", "init_loss_scaling": 2.0**60})
    model: nn.Module = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    x, y = batch(rank, shape=(1, 6, 6))
    skipped = [optimizer.minimize(F.cross_entropy(model(x), y)).skipped for _ in range(3)]
    return all(bool(t.isfinite().all()) for t in model.state_dict().values()), skipped


def test_an_overflow_under_float16_is_skipped_and_not_an_error() -> None:
    for finite, skipped in run_ranks(_overflow, 2):
        assert finite and skipped[0]


def _hopeless(rank: int) -> tuple[str, int]:
    config = {"dtype": "float16", "init_loss_scaling": 4.0, "decr_every_n_nan_or_inf": 2}
    model: nn.Module = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        strategy = fleet.DistributedStrategy(amp=True, amp_configs=config)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    x, y = batch(rank)
    x[0, 0] = NAN

    def train() -> None:
        for _ in range(20):
            optimizer.minimize(F.cross_entropy(model(x), y))

    return raised(train), optimizer.skipped


def test_a_loss_scale_that_cannot_shrink_any_more_hides_no_nan() -> None:
    for told, skipped in run_ranks(_hopeless, 2):
        assert told.startswith("FleetError: update 6 was not made")
        assert skipped == 5  # two each at 4 and 2, one at 1


def _skipping(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    strategy = fleet.DistributedStrategy(on_nan_inf="skip")
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def _skip_after_resume(rank: int, folder: str) -> list[Tensor]:
    """A run and one resumed from it meet the same NaN in their next update."""
    warnings.simplefilter("ignore", FleetWarning)
    states = []
    for resumes in (False, True):
        model, optimizer = _skipping(cnn())
        if resumes:
            fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
        else:
            for step in range(3):
                x, y = batch(10 * step + rank, shape=(1, 6, 6))
                loss = F.cross_entropy(model(x), y)
                if step == 2:  # skipped; its statistics are finite, and stay
                    loss = loss + NAN
                optimizer.minimize(loss)
            fleet.save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
        before = flat_state(model)
        x, y = batch(rank, shape=(1, 6, 6))
        optimizer.minimize(F.cross_entropy(model(x * NAN), y))
        states += [before, flat_state(model)]
    return states


@pytest.mark.parametrize("size", [1, 2])
def test_a_skip_right_after_a_resume_goes_back_to_the_buffers_that_were_loaded(size: int, tmp_path: Path) -> None:
    for before, after, loaded, resumed in run_ranks(_skip_after_resume, size, str(tmp_path)):
        assert torch.equal(before, loaded) and torch.equal(after, resumed)
        assert int((before != after).sum()) == 2  # the batches that each BatchNorm has counted; its statistics are as before


class Growing(nn.Module):
    """A table that is made again, longer, when a longer input comes: rotary embeddings do so."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("table", torch.ones(numel), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.ones(2 * self.table.numel())
        y: Tensor = self.linear(x)
        return y


def _grow(rank: int, numel: int) -> str:
    model, optimizer = _skipping(Growing(numel))

    def train() -> None:
        for step in range(3):
            x, y = batch(10 * step + rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FleetWarning)
                optimizer.minimize(F.cross_entropy(model(x * NAN if step == 1 else x), y))

    return raised(train)


@pytest.mark.parametrize(("size", "numel"), [(2, 20000), (1, 16)])
def test_a_table_that_grows_is_no_trouble_where_updates_may_be_skipped(size: int, numel: int) -> None:
    assert run_ranks(_grow, size, numel) == ["nothing raised"] * size

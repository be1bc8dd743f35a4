"""Local SGD, faults that were once there: each test is the smallest run that met one of them."""

from __future__ import annotations

import gc
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import loss_of, mean_over_ranks, net, on_nodes, rendezvous, snapshot, with_norm

NAN = float("nan")
FINE = "nothing raised"


def local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


def pair(model: nn.Module, strategy: dict[str, Any], lr: float = 0.1) -> tuple[nn.Module, Any]:
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=lr), fleet.DistributedStrategy(**strategy))


def train(rank: int, model: nn.Module, optimizer: Any, first: int, last: int, *, bad: int = 0) -> list[Tensor]:
    """The first layer's weights after each of these updates; at `bad` rank 1's loss is NaN."""
    seen = []
    for update in range(first, last + 1):
        loss = loss_of(model, rank, update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # of a skip
            optimizer.minimize(loss * NAN if rank == 1 and update == bad else loss)
        seen.append(next(model.parameters()).detach().clone())
    return seen


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


class Slope(nn.Module):
    """One weight, which the loss pulls down by a slope that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, slope: float) -> Tensor:
        return self.weight * slope


# --- buffers -----------------------------------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


MASK = torch.tensor([[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf]])


def _masked(rank: int, overlap_steps: int) -> Tensor:
    model, optimizer = pair(WithBuffer(MASK.clone()), local(k_steps=2, overlap_steps=overlap_steps))
    train(rank, model, optimizer, 1, 6)
    held: Tensor = model.held
    return held


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_mask_of_minus_infinity_stays_as_it_is(overlap_steps: int) -> None:
    for held in run_ranks(_masked, 2, overlap_steps):
        same(held, MASK)


def _reshaped(rank: int) -> str:
    model, optimizer = pair(WithBuffer(torch.zeros(3)), local(k_steps=2))
    train(rank, model, optimizer, 1, 2)
    model.held = torch.zeros(5)
    return raised(lambda: train(rank, model, optimizer, 3, 4))


def test_a_buffer_that_changes_its_shape_while_ranks_train_alone_is_named() -> None:
    for told in run_ranks(_reshaped, 2):
        assert told.startswith("ConfigError: buffer `held` has the shape (5,), and had (3,)")


def _table(rank: int) -> list[str]:
    model, optimizer = pair(WithBuffer(torch.zeros(16385)), local(k_steps=2))
    train(rank, model, optimizer, 1, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for update in range(4, 8):
            model.held.add_(rank + 1)
            optimizer.minimize(loss_of(model, rank, update))
    return [str(warning.message) for warning in seen]


def test_a_table_changed_while_ranks_train_alone_is_warned_of_once() -> None:
    first, second = run_ranks(_table, 2)
    assert len(first) == 1 and first[0].startswith("the ranks have changed these buffers differently: `held`.") and not second


# --- windows that are thrown away, half filled, or full of NaN ---------------------------------------------------------------


def _thrown_away(rank: int) -> tuple[list[float], list[bool]]:
    model, optimizer = pair(Slope(), local(k_steps=2))
    seen, averaged = [], []
    for update in range(1, 6):
        optimizer.backward(model(3.0 if rank else 1.0))
        if rank == 1 and update == 3:
            optimizer.zero_grad()
            averaged.append(True)  # that call has no report; the weight tells
        else:
            averaged.append(optimizer.step().averaged)
            optimizer.zero_grad()
        seen.append(model.weight.item())
    return seen, averaged


def test_a_rank_that_throws_its_update_away_meets_the_others_on_time() -> None:
    """Slopes 1 and 3, lr 0.1, from 1: dense to 0.8; alone 0.7 | 0.5; then 0.6 | thrown away, mean 0.55; then 0.35 | -0.05."""
    (first, one), (second, two) = run_ranks(_thrown_away, 2)
    assert one == two == [False, False, True, False, True]
    assert first == pytest.approx([0.8, 0.7, 0.55, 0.45, 0.15], abs=1e-12)
    assert second == pytest.approx([0.8, 0.5, 0.55, 0.25, 0.15], abs=1e-12)


def _half_filled(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two micro-batches an update; the seventh, first of its window, is NaN where it enters rank 1's BatchNorm."""
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "on_nan_inf": "skip"}

    def run(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for micro in range(first, last + 1):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * micro + rank)).double()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FleetWarning)
                optimizer.minimize(model(x * NAN if rank == 1 and micro == 7 else x).square().mean())

    straight, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    run(straight, optimizer, 1, 20)
    undisturbed = snapshot(straight, optimizer)
    model, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    run(model, optimizer, 1, 7)
    fleet.save_checkpoint(folder, step=7, model=model, optimizer=optimizer)
    model, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    run(model, optimizer, 8, 20)
    return undisturbed, snapshot(model, optimizer)


def test_a_window_half_filled_with_nan_is_saved_and_resumed_to_the_bit_with_finite_statistics(tmp_path: Path) -> None:
    for undisturbed, resumed in run_ranks(_half_filled, 2, str(tmp_path)):
        same(resumed, undisturbed)
        assert all(bool(tensor.isfinite().all()) for tensor in resumed.values())


def _average_in_window(rank: int) -> tuple[str, str, bool]:
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, optimizer = pair(net(), local(k_steps=50) | merged)
    train(rank, model, optimizer, 1, 5)
    inside = raised(optimizer.average)
    optimizer.flush()
    after = raised(optimizer.average)
    return inside, after, torch.equal(model[0].weight, mean_over_ranks(model[0].weight))


def test_average_inside_a_merge_window_asks_for_a_flush_first() -> None:
    for inside, after, equal in run_ranks(_average_in_window, 2):
        assert inside.startswith("FleetError: ") and "flush" in inside
        assert after == FINE and equal


# --- an error that was caught ------------------------------------------------------------------------------------------------


def _caught(rank: int, folder: str) -> tuple[list[str], list[str]]:
    """Rounds after 3 and 5: the first hears of update 2; loaded again, the next hears of update 4."""
    model, optimizer = pair(net(), local(k_steps=2))
    train(rank, model, optimizer, 1, 1)
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    heard = [raised(lambda: train(rank, model, optimizer, 2, 3, bad=2))]
    after = [raised(optimizer.zero_grad)] + [raised(lambda u=update: train(rank, model, optimizer, u, u)) for update in (4, 5, 6)]
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    heard.append(raised(lambda: train(rank, model, optimizer, 2, 5, bad=4)))
    return heard, after


def test_after_an_error_at_a_round_was_caught_no_call_fails_by_accident_and_the_next_error_is_clear(tmp_path: Path) -> None:
    ranks = run_ranks(_caught, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    heard, after = ranks[0]
    for told, update in zip(heard, (2, 4), strict=True):
        assert told.startswith("FleetError: ") and f"not made: update {update} of rank 1: losses nan" in told
    assert all(told == FINE or told.startswith("FleetError: ") for told in after)


def _failed_before_save(rank: int, folder: str) -> tuple[str, list[tuple[str, bool]]]:
    """Rounds after 5 and 9; the update that fails is 3."""
    model, optimizer = pair(net(), local(k_steps=4))
    train(rank, model, optimizer, 1, 3, bad=3)
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
    told = raised(lambda: train(rank, model, optimizer, 4, 5))
    resumed = []
    for one, its in ((model, optimizer), pair(net(), local(k_steps=4))):
        fleet.load_checkpoint(folder, model=one, optimizer=its)
        went = raised(lambda m=one, o=its: train(rank, m, o, 4, 9))
        resumed.append((went, torch.equal(one[0].weight, mean_over_ranks(one[0].weight))))
    return told, resumed


def test_a_checkpoint_saved_after_an_update_that_failed_can_be_resumed(tmp_path: Path) -> None:
    """By the pair that heard of it, and by a new one."""
    for told, resumed in run_ranks(_failed_before_save, 2, str(tmp_path)):
        assert told.startswith("FleetError: ") and "update 3 of rank 1" in told
        assert resumed == [(FINE, True)] * 2


# --- a request to stop under way ---------------------------------------------------------------------------------------------


def _ask_and_save(rank: int, folder: str) -> int:
    """Rounds after 3, 5, 7, each settled as the next is launched: that of 7 brings the request, that of 9 still holds it."""
    model, optimizer = pair(net(), local(k_steps=2, overlap_steps=2))
    for update in range(1, 16):
        if fleet.should_stop():
            fleet.save_checkpoint(folder, step=update - 1, model=model, optimizer=optimizer)
            return update - 1
        if update == 6 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train(rank, model, optimizer, update, update)
    return -1


def _resume_unasked(rank: int, folder: str) -> list[bool]:
    model, optimizer = pair(net(), local(k_steps=2, overlap_steps=2))
    found = fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert found is not None
    answers = []
    for update in range(found.step + 1, found.step + 8):
        train(rank, model, optimizer, update, update)
        answers.append(fleet.should_stop())
    return answers


def test_a_request_to_stop_that_is_under_way_in_a_checkpoint_does_not_stop_the_resumed_run(tmp_path: Path) -> None:
    assert run_ranks(_ask_and_save, 2, str(tmp_path)) == [9, 9]
    assert run_ranks(_resume_unasked, 2, str(tmp_path)) == [[False] * 7] * 2


# --- save_model and averaged() -----------------------------------------------------------------------------------------------


def _two_models(rank: int, folder: str) -> tuple[list[str], list[bool], Tensor]:
    (one, first), (two, second) = (pair(net(), local(k_steps=50)) for _ in range(2))
    for model, optimizer in ((one, first), (two, second)):
        train(rank, model, optimizer, 1, 4)
    paths = [Path(folder) / name for name in ("both", "without", "right")]
    told = [
        raised(lambda: fleet.save_model(paths[0], nn.ModuleList([one, two]), first)),
        raised(lambda: fleet.save_model(paths[1], two)),
        raised(lambda: fleet.save_model(paths[2], two, second)),
    ]
    return told, [path.exists() for path in paths], mean_over_ranks(two[0].weight)


def test_a_model_whose_own_optimizer_is_not_given_is_refused_by_save_model_on_all_ranks(tmp_path: Path) -> None:
    for told, written, mean in run_ranks(_two_models, 2, str(tmp_path)):
        assert all(text.startswith("ConfigError: ") and "save_model(path, model, optimizer)" in text for text in told[:2])
        assert told[2] == FINE and written == [False, False, True]
        torch.testing.assert_close(load_file(tmp_path / "right")["0.weight"], mean, rtol=0, atol=1e-15)


def _inside(rank: int, folder: str) -> tuple[list[str], list[str], Tensor, Tensor]:
    model, optimizer = pair(net(), local(k_steps=50))
    objects = {"model": model, "optimizer": optimizer}
    train(rank, model, optimizer, 1, 3)
    fleet.save_checkpoint(folder, step=3, **objects)
    train(rank, model, optimizer, 4, 5)
    before = model[0].weight.detach().clone()
    optimizer.backward(loss_of(model, rank, 6))
    with optimizer.averaged():
        told = [raised(optimizer.step)]
    optimizer.zero_grad()
    with optimizer.averaged():
        told.append(raised(lambda: fleet.load_checkpoint(folder, **objects)))
        told.append(raised(lambda: fleet.save_checkpoint(folder, step=6, **objects)))
        told.append(raised(lambda: train(rank, model, optimizer, 6, 6)))
    saved = [path.name for path in Path(folder).glob("step-*")]
    return told, saved, before, model[0].weight.detach().clone()


def test_inside_averaged_neither_a_step_nor_a_checkpoint_is_taken_nor_one_loaded(tmp_path: Path) -> None:
    for told, saved, before, after in run_ranks(_inside, 2, str(tmp_path)):
        assert all("inside `with optimizer.averaged():`" in text for text in told)
        assert saved == ["step-0000000003"]
        same(after, before)


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def _rolled_back(rank: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    model, optimizer = pair(net(), local(k_steps=2, begin_step=3, outer_momentum=0.9))
    train(rank, model, optimizer, 1, 2)
    fleet.save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    first = train(rank, model, optimizer, 3, 10)
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    return first, train(rank, model, optimizer, 3, 10)


def test_a_run_rolled_back_into_its_dense_phase_goes_the_same_way_again(tmp_path: Path) -> None:
    for first, again in run_ranks(_rolled_back, 2, str(tmp_path)):
        same(again, first)


def _other_strategies(rank: int, folder: str) -> list[tuple[str, bool]]:
    model, optimizer = pair(net(), local(k_steps=2))
    train(rank, model, optimizer, 1, 4)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=optimizer)
    found = []
    for strategy in ({"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}}, {}):
        model, optimizer = pair(net(), strategy)
        before = snapshot(model, optimizer)
        told = raised(lambda m=model, o=optimizer: fleet.load_checkpoint(folder, model=m, optimizer=o))
        after = snapshot(model, optimizer)
        found.append((told, before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)))
    return found


def test_a_checkpoint_of_localsgd_is_refused_by_other_strategies_before_a_weight_has_changed(tmp_path: Path) -> None:
    for (adaptive, kept), (dense, also_kept) in run_ranks(_other_strategies, 2, str(tmp_path)):
        assert kept and also_kept
        assert adaptive.startswith("CheckpointError: ") and "an adaptive one (adaptive_localsgd)" in adaptive
        assert dense.startswith("CheckpointError: ") and "saved under Local SGD" in dense


def _alone(rank: int, folder: str) -> Tensor:
    model, optimizer = pair(net(), local(k_steps=2))
    train(rank, model, optimizer, 1, 4)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=optimizer)
    return model[0].weight.detach().clone()


def _taken_over(rank: int, folder: str, configs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    model, optimizer = pair(net(), local(k_steps=2, **configs))
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True)
    begun = model[0].weight.detach().clone()
    return begun, *train(rank, model, optimizer, 5, 9)[-2:]


def test_what_one_rank_saved_two_ranks_resume_or_one_with_outer_momentum(tmp_path: Path) -> None:
    (saved,) = run_ranks(_alone, 1, str(tmp_path))
    (begun, before, after), (second_begun, second_before, second_after) = run_ranks(_taken_over, 2, str(tmp_path), {})
    same([begun, second_begun], [saved, saved])
    assert not torch.equal(before, second_before)
    same(after, second_after)  # update 9 ends a period
    ((begun, _, after),) = run_ranks(_taken_over, 1, str(tmp_path), {"outer_momentum": 0.9})
    same(begun, saved)
    assert bool(after.isfinite().all()) and not torch.equal(after, begun)


def _landed(rank: int, folder: str) -> tuple[str, bool]:
    """The round of update 5 would be settled at 8, and is under way after 6."""
    model, optimizer = pair(net(), local(k_steps=4, overlap_steps=3) | {"desync_check_steps": 1})
    train(rank, model, optimizer, 1, 6)
    fleet.save_checkpoint(folder, step=6, model=model, optimizer=optimizer)
    model, optimizer = pair(net(), local(k_steps=4) | {"desync_check_steps": 1})
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    told = raised(lambda: train(rank, model, optimizer, 7, 13))
    return told, torch.equal(model[0].weight, mean_over_ranks(model[0].weight))


def test_a_round_under_way_that_lands_in_a_run_without_overlap_gives_no_false_alarm(tmp_path: Path) -> None:
    assert run_ranks(_landed, 2, str(tmp_path)) == [(FINE, True)] * 2


def _outside(rank: int, folder: str, strategy: dict[str, Any]) -> tuple[float, float, float, float]:
    def made() -> tuple[Tensor, nn.Module, Any]:
        model, outside = net(), nn.Parameter(torch.ones((), dtype=torch.float64))
        sgd = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
        return outside, *fleet.distribute(model, sgd, fleet.DistributedStrategy(**strategy))

    def run(outside: Tensor, model: nn.Module, optimizer: Any, first: int, last: int) -> float:
        for update in range(first, last + 1):
            optimizer.minimize(loss_of(model, rank, update) * outside + (outside - 3 * rank).square())
        return outside.item()

    outside, model, optimizer = made()
    saved = run(outside, model, optimizer, 1, 3)
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
    end = run(outside, model, optimizer, 4, 8)
    outside, model, optimizer = made()
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    return saved, outside.item(), end, run(outside, model, optimizer, 4, 8)


@pytest.mark.parametrize("strategy", [{}, local(k_steps=4)], ids=["dense", "localsgd"])
def test_a_trained_parameter_outside_the_model_comes_back_from_a_checkpoint(tmp_path: Path, strategy: dict[str, Any]) -> None:
    for saved, loaded, end, resumed in run_ranks(_outside, 2, str(tmp_path), strategy):
        assert loaded == saved != 1.0 and resumed == end != saved


# --- settings, weights, state ------------------------------------------------------------------------------------------------


ADAPTIVE = {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 9, "max_k_steps": 8}}


def _refused(rank: int, strategy: dict[str, Any]) -> str:
    return raised(lambda: pair(net(), strategy))


def test_nesterov_without_momentum_is_refused() -> None:
    for told in run_ranks(_refused, 2, local(k_steps=2, outer_nesterov=True)):
        assert told.startswith("ConfigError: ") and "outer_nesterov" in told and "outer_momentum" in told


def _weighted(rank: int) -> list[float]:
    model, optimizer = pair(Slope(), local(k_steps=1, across_nodes_every=2))
    slopes, weights = [[-1, 1, -1, 1], [0, 0, -1, -2], [0, 0, 0, 0]], [[1, 1, 1, 1], [100, 100, 100, 300], [1, 1, 0, 0]]
    seen = []
    for slope, weight in zip(slopes, weights, strict=True):
        optimizer.minimize(model(float(slope[rank])), weight=float(weight[rank]))
        seen.append(model.weight.item() - 1)
    return seen


def test_a_round_among_all_weighs_by_all_that_was_trained_on_since_the_last_of_its_kind(tmp_path: Path) -> None:
    """Inside node 1 (100 * 0.1 + 300 * 0.2) / 400 = 0.175; then the ranks count 101, 101, 100, 300 of 602."""
    nodes = (0, 0, 1, 1)
    for rank, seen in enumerate(run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), _weighted)):
        assert seen == pytest.approx([0.0, 0.175 * nodes[rank], 0.175 * 400 / 602], abs=1e-12)


def _paired_again(rank: int) -> list[str]:
    told = []
    gc.disable()
    try:
        for strategy in ({}, local(k_steps=2), local(k_steps=2, overlap_steps=1)):
            model, optimizer = pair(net(), strategy)
            train(rank, model, optimizer, 1, 4)
            del optimizer
            told.append(raised(lambda m=model, s=strategy: pair(m, s)))
    finally:
        gc.enable()
    return told


def test_a_deleted_optimizer_frees_its_model_at_once() -> None:
    assert run_ranks(_paired_again, 2) == [[FINE] * 3] * 2


def _nadam(rank: int) -> list[dict[str, Tensor]]:
    model = net()
    strategy = fleet.DistributedStrategy(**local(k_steps=3, average_state=True), on_nan_inf="skip")
    model, optimizer = fleet.distribute(model, torch.optim.NAdam(model.parameters(), lr=0.01), strategy)
    train(rank, model, optimizer, 1, 4, bad=3)
    return [dict(state) for state in optimizer.state.values()]


def test_nadam_keeps_each_ranks_own_product_where_moments_are_averaged() -> None:
    """Rank 1 has made three updates of four: its product has three factors, whatever the count of steps says."""
    factors = [0.9 * (1 - 0.5 * 0.96 ** (step * 4e-3)) for step in range(1, 5)]
    ranks = run_ranks(_nadam, 2)
    for rank, made in ((0, 4), (1, 3)):
        for state in ranks[rank]:
            assert float(state["step"]) == 4.0
            assert float(state["mu_product"]) == pytest.approx(math.prod(factors[:made]), rel=1e-5)
    for first, second in zip(*ranks, strict=True):
        same([first["exp_avg"], first["exp_avg_sq"]], [second["exp_avg"], second["exp_avg_sq"]])


def _apart(rank: int, call: str) -> str:
    """Rank 0 makes a call that rank 1 does not make; rank 1 goes on to its next round."""
    model, optimizer = pair(Slope(), local(k_steps=3))
    for _ in range(2):
        optimizer.minimize(model(1.0 + rank))

    def meets() -> None:
        if rank == 0 and call == "average":
            optimizer.average()
        elif rank == 0:
            with optimizer.averaged():
                pass
        for _ in range(2):
            optimizer.minimize(model(1.0 + rank))

    return raised(meets)


@pytest.mark.parametrize(("call", "told"), [("average", "calls average()"), ("averaged", "enters averaged()")])
def test_a_call_that_one_rank_makes_alone_is_refused_on_all_when_they_meet(call: str, told: str) -> None:
    first, second = run_ranks(_apart, 2, call)
    assert first == second
    assert f"rank 0 {told} after its update 2, rank 1 averages by the schedule after its update 4" in first


def _caught_and_gone_on(rank: int) -> list[Any]:
    """A failure is told once; whoever catches it and goes on has made each update once."""
    model, optimizer = pair(Slope(), local(k_steps=2))
    told = []
    for update in range(1, 6):
        slope = float("nan") if (rank, update) == (1, 2) else 1.0 + rank
        told.append(raised(lambda slope=slope: optimizer.minimize(model(slope))))
    return [told, model.weight.item()]


def test_a_failure_is_told_once_and_no_update_is_made_twice_afterwards() -> None:
    ranks = run_ranks(_caught_and_gone_on, 2)
    for told, _ in ranks:
        assert [text != "nothing raised" for text in told] == [False, False, True, False, False] and "update 2 of rank 1" in told[
            2
        ]
    assert ranks[0][1] == ranks[1][1]


def _failed_in_flight(rank: int) -> list[str]:
    """Rounds are launched after updates 4 and 7, and settled after 6 and 9; rank 1 fails at update 5, in between."""
    model, optimizer = pair(Slope(), local(k_steps=3, overlap_steps=2))
    slopes = [float("nan") if (rank, update) == (1, 5) else 1.0 + rank for update in range(1, 10)]
    return [raised(lambda slope=slope: optimizer.minimize(model(slope))) for slope in slopes]


def test_a_failure_while_a_round_is_under_way_is_told_in_the_next() -> None:
    for told in run_ranks(_failed_in_flight, 2):
        assert told[:8] == [FINE] * 8 and "update 5 of rank 1" in told[8]

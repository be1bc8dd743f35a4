"""Guards checkpoints of Local SGD: other strategies, ranks and phases, rounds and requests under way, save_model, averaged()."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import FINE, local, pair, same, train
from tests.helpers.localsgd_runs import loss_of, mean_over_ranks, net, snapshot


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

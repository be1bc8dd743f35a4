"""strategy.muon on several ranks: the matrices are shared out, and all ranks hold the bits that one of them would make alone."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from fleetx.optim import Muon, gathered
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch


def net() -> nn.Sequential:
    """Of each shape several matrices, tall and wide ones and a convolution; a head and norms."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Conv1d(1, 8, 1), nn.Flatten(), nn.Linear(64, 24)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(24, 24), nn.LayerNorm(24)]
    return nn.Sequential(*layers, nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Linear(24, 4))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:7], "lr": 0.03, "ns_dtype": "float32"}, {"params": params[7:], "weight_decay": 0.2}]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(10 * step + rank)
    return F.cross_entropy(model(x.unsqueeze(1)), y)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _in_pieces(rank: int, piece: int) -> dict[str, Any]:
    with mock.patch.object(gathered, "PIECE_ELEMENTS", piece):  # the process of a rank serves other tests as well
        return _beside_one_alone(rank)


def _beside_one_alone(rank: int) -> dict[str, Any]:
    """Train; a copy makes each update by itself, of the very gradients that the ranks have reduced."""
    model = net()
    inner = torch.optim.AdamW(groups_of(model), lr=0.02, betas=(0.8, 0.9))
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(muon={"muon_weight_decay": 0.3}))
    alone = copy.deepcopy(model)
    settings = {"muon_weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    other = Muon(groups_of(alone), lr=0.02, betas=(0.8, 0.9), model=alone, **settings)
    sent = 0.0
    for step in range(4):
        face.backward(loss_of(model, step, rank))
        for mine, reduced in zip(alone.parameters(), model.parameters(), strict=True):
            mine.grad = None if reduced.grad is None else reduced.grad.clone()
        sent = face.step().bytes_sent
        face.zero_grad()
        other.step()
    state, theirs = face.state_dict()["state"], other.state_dict()["state"]
    return {
        "weights": weights_of(model),
        "alone": weights_of(alone),
        "state": [value for held in state.values() for value in held.values()],
        "state alone": [value for held in theirs.values() for value in held.values()],
        "bytes": sent,
        "shared": len(face.update._current_plan(face.update._matrices()).shares),
    }


@pytest.mark.parametrize(("size", "piece"), [(2, 2**22), (3, 700), (4, 700)])
def test_ranks_that_share_the_work_have_the_bits_of_one_alone(size: int, piece: int) -> None:
    ranks = run_ranks(_in_pieces, size, piece)
    for one in ranks:
        assert one["shared"] == size
        assert same_bits(one["weights"], one["alone"]) and same_bits(one["weights"], ranks[0]["weights"])
        assert same_bits(one["state"], one["state alone"])


def _bytes(rank: int, strategy: dict[str, Any]) -> float:
    x = torch.full((2, 32), 1.0 + rank)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(16)), nn.Linear(32, 2))
    model, face = fleet.distribute(model, torch.optim.AdamW(model.parameters()), fleet.DistributedStrategy(**strategy))
    face.minimize(model(x).square().mean())
    sent: float = face.minimize(model(x).square().mean()).bytes_sent
    return sent


def test_what_is_gathered_is_counted_in_the_report() -> None:
    plain, ours = (run_ranks(_bytes, 2, strategy) for strategy in ({}, {"muon": True}))
    # Two batches of 8 matrices of 32 x 32, one on each rank, in bfloat16: (N - 1) * S.
    assert [a - b for a, b in zip(ours, plain, strict=True)] == [8 * 32 * 32 * 2] * 2


def _of_a_set(rank: int, settings: dict[str, Any], micro_steps: int = 8) -> dict[str, Any]:
    model = net()
    strategy = fleet.DistributedStrategy(**settings)
    model, face = fleet.distribute(model, torch.optim.AdamW(groups_of(model), lr=0.02), strategy)
    for step in range(micro_steps):
        face.minimize(loss_of(model, step, rank))
    state = face.state_dict()["state"]
    held = sum(v.numel() for one in face.state.values() for v in one.values() if isinstance(v, Tensor))
    state_values = [value for number in sorted(state) for _, value in sorted(state[number].items())]
    return {"weights": weights_of(model), "state": state_values, "held": held, "shares": face.update._comm is not None}


@pytest.mark.parametrize("stage", [1, 2])
def test_under_sharding_it_makes_the_same_bits_of_a_share_of_the_state(stage: int) -> None:
    plain = run_ranks(_of_a_set, 2, {"muon": True})
    ours = run_ranks(_of_a_set, 2, {"muon": True, "sharding": {"stage": stage}})
    for rank in range(2):
        assert same_bits(ours[rank]["weights"], plain[0]["weights"])
        assert same_bits(ours[rank]["state"], plain[0]["state"])
        assert ours[rank]["held"] < 0.75 * plain[rank]["held"]


def test_clipped_and_merged_under_sharding_it_differs_by_the_sum_of_squares_alone() -> None:
    more: dict[str, Any] = {"muon": True, "clip_norm": {"max_norm": 0.3}, "gradient_merge": {"k_steps": 2}}
    plain, ours = run_ranks(_of_a_set, 2, more), run_ranks(_of_a_set, 2, {"sharding": True, **more})
    assert same_bits(ours[0]["weights"], ours[1]["weights"])
    for a, b in zip(ours[0]["weights"], plain[0]["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)  # a rounding of the norm, seen through bfloat16 at a rate of 0.03


def test_three_ranks_and_sets_of_two_are_equal_among_themselves_under_sharding() -> None:
    three = run_ranks(_of_a_set, 3, {"muon": True, "sharding": True})
    sets = run_ranks(_of_a_set, 4, {"muon": True, "sharding": {"sharding_degree": 2}})
    assert all(same_bits(one["weights"], three[0]["weights"]) for one in three)
    assert all(same_bits(one["weights"], sets[0]["weights"]) for one in sets)


def test_ranks_that_train_alone_share_nothing_and_meet_when_they_average() -> None:
    ranks = run_ranks(
        _of_a_set, 2, {"muon": True, "localsgd": {"k_steps": 4, "outer_momentum": 0.9, "outer_nesterov": True}}, 9
    )  # the first mean is after 1 + 4
    assert not any(one["shares"] for one in ranks)
    assert same_bits(ranks[0]["weights"], ranks[1]["weights"])


def _skips(rank: int) -> tuple[list[bool], bool, list[Tensor]]:
    model = net()
    strategy = fleet.DistributedStrategy(
        muon=True, amp={"dtype": "float16", "init_loss_scaling": 64.0, "decr_every_n_nan_or_inf": 1}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # it is slow on a CPU
        model, face = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.02), strategy)
    skipped, before, untouched = [], weights_of(model), True
    for step in range(4):
        loss = loss_of(model, step, rank)
        skipped.append(face.minimize(loss * float("inf") if step == 0 and rank == 1 else loss).skipped)
        untouched = untouched and (step > 0 or same_bits(before, weights_of(model)))
    return skipped, untouched, weights_of(model)


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    ranks = run_ranks(_skips, 2)
    assert all(one[0] == [True, False, False, False] and one[1] for one in ranks)
    assert same_bits(ranks[0][2], ranks[1][2])


def _resume(rank: int, folder: str, stop: int | None) -> list[Tensor]:
    model = net()
    strategy = fleet.DistributedStrategy(muon=True, gradient_merge={"k_steps": 3})
    model, face = fleet.distribute(model, torch.optim.AdamW(groups_of(model), lr=0.02), strategy)
    begin = 0
    if stop is None:
        fleet.load_checkpoint(folder, model=model, optimizer=face)
        begin = 7
    for step in range(begin, 12):
        if step == stop:
            fleet.save_checkpoint(folder, step=step, model=model, optimizer=face)
        face.minimize(loss_of(model, step, rank))
    return weights_of(model)


def test_a_run_stopped_inside_a_window_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(_resume, 2, str(tmp_path / "run"), 7)
    again = run_ranks(_resume, 2, str(tmp_path / "run"), None)
    assert same_bits(whole[0], again[0]) and same_bits(whole[1], again[1])


def _ended(rank: int) -> list[str]:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(muon=True))
    face.minimize(loss_of(model, 0, rank))
    twin = copy.deepcopy(face.update)
    said = [str(twin._comm)]
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    scheduler.step()
    said.append(str(face.param_groups[0]["lr"]))
    model, face = fleet.distribute(
        model, inner, fleet.DistributedStrategy(muon=True)
    )  # ends the pair, and goes on with its state
    face.minimize(loss_of(model, 1, rank))
    said.append(raised(lambda: fleet.distribute(model, inner, fleet.DistributedStrategy())))
    said.append(str("ns_steps" in inner.param_groups[0]))
    return said


def test_the_optimizer_given_lends_its_groups_and_gets_them_back() -> None:
    for said in run_ranks(_ended, 2):
        assert said[:2] == ["None", "0.01"] and said[3] == "False"
        assert "was made by strategy.muon, and AdamW cannot go on with it" in said[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [2, 3])
def test_on_a_gpu_ranks_that_share_the_work_have_the_bits_of_one_alone(size: int) -> None:
    for one in run_ranks(_in_pieces, size, 700, env={"FLEETX_DEVICE": "cuda"}):
        assert one["shared"] == size and same_bits(one["weights"], one["alone"])


def _wrapped(rank: int) -> tuple[bool, list[Tensor]]:
    model = nn.parallel.DistributedDataParallel(net())
    model, face = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.02), fleet.DistributedStrategy(muon=True))
    for step in range(3):
        face.minimize(loss_of(model, step, rank))
    return face.update._comm is not None, weights_of(model)


def test_the_work_is_shared_where_ddp_reduces() -> None:
    first, second = run_ranks(_wrapped, 2)
    assert first[0] and second[0] and same_bits(first[1], second[1])

"""Sharding: the numbers of plain training, gradients that are clipped or refused, whole states, and what it is refused with."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.auto_runs import short_measuring
from tests.helpers.harness import raised, run_ranks

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda params: optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: optim.Adadelta(params),
    "asgd": lambda params: optim.ASGD(params, lr=0.05),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 37),
        nn.ReLU(),
        nn.Linear(37, 5),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 2, 6, 6, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def _train(
    rank: int, optimizer: str, strategy: dict[str, Any], loop: str = "minimize", steps: int = 5, param_groups: bool = False
) -> dict[str, Any]:
    model = net()
    params: Any = model.parameters()
    if param_groups:
        params = [
            {"params": list(model[4].parameters()), "lr": 0.02},
            {"params": [*model[0].parameters(), *model[6].parameters()]},
        ]
        model[1].requires_grad_(False)
    model, face = fleet.distribute(model, OPTIMIZERS[optimizer](params), fleet.DistributedStrategy(**strategy))
    reports = []
    for step in range(steps):
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x), y)
        if loop == "minimize":
            reports.append(face.minimize(loss))
            continue
        loss.backward()
        if loop == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        elif loop == "halve":
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        elif loop == "twice":
            F.cross_entropy(model(x[:3]), y[:3]).backward()
        elif loop == "autograd.grad":
            model.eval()  # statistics that change after the reduce would differ between ranks
            torch.autograd.grad(model(x[:3]).sum(), list(model.parameters()))
            model.train()
        reports.append(face.step())
        face.zero_grad(set_to_none=loop != "zeros")
        if loop == "zeros":
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.zero_()
    held = sum(value.numel() for state in face.state.values() for value in state.values() if isinstance(value, Tensor))
    state = face.state_dict()
    return {
        "weights": [value.detach().clone() for value in model.state_dict().values()],
        "state": [v for number in sorted(state["state"]) for _, v in sorted(state["state"][number].items()) if v is not None],
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]],
        "held": held,
        "norms": [report.grad_norm for report in reports],
        "bytes": reports[-1].bytes_sent,
    }


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: list[Tensor], b: list[Tensor], tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


CASES = [*((name, 1) for name in OPTIMIZERS), ("sgd", 2), ("adamw", 2)]


@pytest.mark.parametrize(("optimizer", "stage"), CASES)
def test_two_ranks_have_the_bits_of_plain_training_weights_and_gathered_state(optimizer: str, stage: int) -> None:
    plain = run_ranks(_train, 2, optimizer, {})
    ours = run_ranks(_train, 2, optimizer, {"sharding": {"stage": stage}})
    for rank in range(2):
        assert same_bits(ours[rank]["weights"], plain[0]["weights"])
        assert same_bits(ours[rank]["state"], plain[0]["state"]) and ours[rank]["groups"] == plain[0]["groups"]
        assert ours[rank]["held"] < 0.75 * plain[rank]["held"]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_more_ranks_differ_by_the_order_of_sums_alone(optimizer: str, size: int) -> None:
    plain = run_ranks(_train, size, optimizer, {})
    ours = run_ranks(_train, size, optimizer, {"sharding": True})
    assert all(same_bits(one["weights"], ours[0]["weights"]) for one in ours)
    close(ours[0]["weights"], plain[0]["weights"], 2e-6)


MORE: dict[str, dict[str, Any]] = {
    "lars": {"lars": {"lars_coeff": 0.02}},
    "lars, clipped": {"lars": True, "clip_norm": {"max_norm": 0.2}},
    "merge": {"gradient_merge": {"k_steps": 2}},
    "clip": {"clip_norm": {"max_norm": 0.2}},
    "powersgd": {"powersgd": {"begin_step": 2, "rank": 2}},
    "recompute": {"recompute": {"checkpoints": ["0", "4"]}},
    "sync_batch_norm": {"sync_batch_norm": True},
    "bf16": {"bf16_allreduce": True},
    "small buckets": {"fuse_grad_size_in_MB": 0.01},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize(("name", "stage"), [*((name, 1) for name in MORE), ("lars, clipped", 2), ("merge", 2), ("unused", 2)])
def test_beside_other_parts_it_trains_as_they_do_without_it(name: str, stage: int) -> None:
    inner = {"optimizer": "sgd"} if "lars" not in name else {"optimizer": "momentum"}
    plain = run_ranks(_train_with, 2, inner["optimizer"], MORE[name])
    ours = run_ranks(_train_with, 2, inner["optimizer"], MORE[name] | {"sharding": {"stage": stage}})
    assert same_bits(ours[0]["weights"], ours[1]["weights"])
    close(ours[0]["weights"], plain[0]["weights"], 2e-6)


def _train_with(rank: int, optimizer: str, strategy: dict[str, Any]) -> dict[str, Any]:
    if optimizer == "momentum":
        OPTIMIZERS["momentum"] = lambda params: optim.SGD(params, lr=0.5, momentum=0.9)
    return _train(rank, optimizer, strategy, steps=6)


def _float16(rank: int, strategy: dict[str, Any]) -> list[Any]:
    """Half of the updates overflow on one rank alone."""
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # slow on a CPU
        settings = {"dtype": "float16", "init_loss_scaling": 1024, "decr_every_n_nan_or_inf": 1}
        chosen = fleet.DistributedStrategy(amp=settings, **strategy)
        model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), chosen)
    told: list[Any] = []
    for step in range(6):
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x), y)
        report = face.minimize(loss * (float("inf") if rank == 1 and step % 2 else 1.0))
        told += [report.updated, report.loss_scale]
    return [told, [value.detach().clone() for value in model.state_dict().values()]]


def test_an_overflow_on_one_rank_is_agreed_on_by_all() -> None:
    ours, plain = run_ranks(_float16, 2, {"sharding": True}), run_ranks(_float16, 2, {})
    assert ours[0][0] == ours[1][0] == plain[0][0] and ours[0][0][::2] == [True, False] * 3
    assert same_bits(ours[0][1], ours[1][1])
    close(ours[0][1], plain[0][1], 2e-6)


def _lamb(rank: int, strategy: dict[str, Any]) -> list[Tensor]:
    model = net()
    inner = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(lamb=True, **strategy))
    for step in range(5):
        x, y = batch(step, rank)
        face.minimize(F.cross_entropy(model(x), y))
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("size", [2, 3])
def test_lamb_scales_by_the_norms_of_whole_tensors(size: int) -> None:
    close(run_ranks(_lamb, size, {"sharding": True})[0], run_ranks(_lamb, size, {})[0], 2e-6)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("loop", ["bare", "clip", "halve", "twice", "zeros", "autograd.grad"])
def test_an_unchanged_loop_trains_as_without_it(loop: str, stage: int) -> None:
    plain = run_ranks(_train, 2, "adamw", {}, loop)
    ours = run_ranks(_train, 2, "adamw", {"sharding": {"stage": stage}}, loop)
    close(ours[0]["weights"], plain[0]["weights"], 2e-6 if loop in ("clip", "twice") else 0.0)


def test_groups_with_their_own_rates_and_frozen_layers_stay_as_they_are() -> None:
    plain = run_ranks(_train, 2, "adamw", {}, "minimize", 5, True)
    ours = run_ranks(_train, 2, "adamw", {"sharding": True}, "minimize", 5, True)
    assert same_bits(ours[0]["weights"], plain[0]["weights"]) and ours[0]["groups"] == plain[0]["groups"]


def test_sets_of_neighbours_train_as_all_ranks_together() -> None:
    ours = run_ranks(_train, 4, "adamw", {"sharding": {"sharding_degree": 2}})
    assert all(same_bits(one["weights"], ours[0]["weights"]) for one in ours)
    close(ours[0]["weights"], run_ranks(_train, 4, "adamw", {})[0]["weights"], 2e-6)


def _bytes(rank: int, strategy: dict[str, Any]) -> int:
    warnings.simplefilter("ignore", FleetWarning)  # all ranks have the same samples
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.01), fleet.DistributedStrategy(**strategy))
    face.minimize(model(torch.ones(2, 512)).square().mean())
    return int(face.minimize(model(torch.ones(2, 512)).square().mean()).bytes_sent)


@pytest.mark.parametrize("size", [2, 4])
def test_it_sends_what_an_all_reduce_sends(size: int) -> None:
    assert run_ranks(_bytes, size, {"sharding": True})[0] <= 1.01 * run_ranks(_bytes, size, {})[0]


# --- gradients ----------------------------------------------------------------------------------------------------------


def _looks(rank: int) -> list[str]:
    model = net()
    model, _ = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(sharding=True))
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    grad = model[4].weight.grad
    assert grad is not None
    said = [
        raised(lambda: grad.abs()),
        raised(lambda: grad + 1),
        raised(lambda: grad.tolist()),
        raised(lambda: torch.stack([grad])),
    ]
    said += [raised(lambda: grad.norm(1)), raised(lambda: grad.clone()), raised(lambda: grad.data.sum())]
    facts = (grad.shape == model[4].weight.shape, grad.dtype == torch.float32, not grad.is_sparse, "share" in repr(grad))
    assert all(facts)
    return said


def test_reading_a_gradient_of_which_this_rank_has_a_part_is_an_error_with_what_works() -> None:
    for said in run_ranks(_looks, 2)[0]:
        assert said.startswith("ConfigError: ") and "has the mean of its share of it alone" in said and "clip_grad_norm_" in said


def _norms(rank: int, strategy: dict[str, Any]) -> list[float]:
    model = net()
    model, _ = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**strategy))
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    norms = [float(param.grad.norm()) for param in model.parameters() if param.grad is not None]
    return [*norms, float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), float(model[0].weight.grad.norm())]


def test_norms_are_those_of_whole_tensors_also_after_clipping() -> None:
    plain, ours = run_ranks(_norms, 2, {}), run_ranks(_norms, 2, {"sharding": True})
    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)


def _without_zeroing(rank: int, stage: int) -> str:
    model = net()
    strategy = fleet.DistributedStrategy(sharding={"stage": stage})
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), strategy)
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    face.step()
    F.cross_entropy(model(x), y).backward()  # may be of another pair's loss, which zero_grad() drops
    return raised(face.step)


@pytest.mark.parametrize("stage", [1, 2])
def test_adding_to_the_last_updates_gradient_is_an_error(stage: int) -> None:
    assert "Call optimizer.zero_grad() after each step()" in run_ranks(_without_zeroing, 2, stage)[0]


def _memory(rank: int) -> tuple[list[int], int, int]:
    """Return the bytes of whole buckets after each micro-step of windows of two, those of this rank's shares, and the buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    strategy = fleet.DistributedStrategy(sharding={"stage": 2}, gradient_merge={"k_steps": 2}, fuse_grad_size_in_MB=0.5)
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.01, momentum=0.9), strategy)
    buckets, whole = face.pipeline.buckets, []
    for step in range(4):
        face.minimize(model(torch.randn(4, 256, generator=torch.Generator().manual_seed(step + 9 * rank))).square().mean())
        whole.append(sum(bucket.wire.untyped_storage().nbytes() for bucket in buckets))
    return whole, sum(bucket.reduced.nbytes for bucket in buckets), len(buckets)


def test_stage_2_has_memory_for_whole_buckets_inside_a_window_alone() -> None:
    whole, own, buckets = run_ranks(_memory, 2)[0]
    parameters = 8 * (256 * 256 + 256) * 4
    assert buckets >= 4 and own == pytest.approx(parameters / 2, rel=0.01)
    assert whole[0] == whole[2] == pytest.approx(parameters, rel=0.01) and whole[1] == whole[3] == 0


def _in_flight(rank: int) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    strategy = fleet.DistributedStrategy(sharding={"stage": 2}, fuse_grad_size_in_MB=0.5)
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.01), strategy)
    reduce, seen = face.pipeline.stages.reduce, []
    start = reduce.start

    def counted(*args: Any) -> Any:
        seen.append(sum(bucket.wire.untyped_storage().nbytes() > 0 for bucket in face.pipeline.buckets))
        return start(*args)

    reduce.start = counted  # type: ignore[method-assign]
    face.minimize(model(torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))).square().mean())
    return seen


def test_stage_2_has_few_whole_buckets_at_once_during_backward() -> None:
    seen = run_ranks(_in_flight, 2)[0]
    assert len(seen) >= 8 and max(seen) <= 4


def _ended_stage_2(rank: int) -> bool:
    """A backward after the pair has ended adds to no memory that was given back."""
    model = net()
    inner = optim.SGD(model.parameters(), lr=0.1)
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(sharding={"stage": 2}))
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    copied = copy.deepcopy(model)
    face.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, face = fleet.distribute(model, inner, fleet.DistributedStrategy())
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(copied(x), y).backward()
    return all(
        param.grad is not None and bool(param.grad.isfinite().all()) for param in [*model.parameters(), *copied.parameters()]
    )


def test_a_pair_of_stage_2_that_ended_leaves_no_gradient_without_memory() -> None:
    assert run_ranks(_ended_stage_2, 2) == [True, True]


def _nan(rank: int) -> str:
    model = net()
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(sharding=True))
    before = copy.deepcopy(model.state_dict())
    x, y = batch(0, rank)
    if rank == 1:
        model[6].weight.register_hook(lambda grad: grad * float("nan"))
    said = raised(lambda: face.minimize(F.cross_entropy(model(x), y)))
    assert all(
        torch.equal(value, before[name])
        for name, value in model.state_dict().items()
        if "running" not in name and "num" not in name
    )
    return said


def test_a_nan_on_one_rank_stops_all_with_the_same_names_and_the_weights_before() -> None:
    first, second = run_ranks(_nan, 2)
    assert first == second and "Gradients: 6.weight" in first


# --- state and checkpoints ----------------------------------------------------------------------------------------------


def _steps(model: nn.Module, face: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = batch(step, rank)
        face.minimize(F.cross_entropy(model(x), y))


def _save(rank: int, folder: str, strategy: dict[str, Any]) -> list[Tensor]:
    warnings.simplefilter("ignore", FleetWarning)  # all ranks have the same samples
    model = net()
    model, face = fleet.distribute(model, optim.AdamW(model.parameters(), lr=0.01), fleet.DistributedStrategy(**strategy))
    _steps(model, face, 0, 0, 3)
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=face)
    _steps(model, face, 0, 3, 6)
    return [value.detach().clone() for value in model.state_dict().values()]


def _load(rank: int, folder: str, strategy: dict[str, Any]) -> list[Tensor]:
    warnings.simplefilter("ignore", FleetWarning)  # all ranks have the same samples
    model = net()
    model, face = fleet.distribute(model, optim.AdamW(model.parameters(), lr=0.5), fleet.DistributedStrategy(**strategy))
    assert fleet.load_checkpoint(folder, model=model, optimizer=face, new_world_size=True) is not None
    _steps(model, face, 0, 3, 6)
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("saved_on", "saved", "loaded_on", "loaded"),
    [(2, True, 2, True), (4, True, 2, True), (2, True, 3, True), (2, True, 2, False), (2, False, 2, True), (4, True, 1, False)],
)
def test_a_checkpoint_loads_on_any_number_of_ranks_sharded_or_not(
    saved_on: int, saved: bool, loaded_on: int, loaded: bool, tmp_path: Path
) -> None:
    # All ranks train on the same samples, so that the numbers do not depend on how many there are, but for the order of sums.
    went_on = run_ranks(_save, saved_on, str(tmp_path), {"sharding": saved, "desync_check_steps": 0})
    resumed = run_ranks(_load, loaded_on, str(tmp_path), {"sharding": loaded, "desync_check_steps": 0})
    assert all(same_bits(one, resumed[0]) for one in resumed)
    close(resumed[0], went_on[0], 0.0 if (saved_on, loaded_on) == (2, 2) else 1e-5)


def _in_mid_window(rank: int, folder: str, sharding: Any) -> tuple[bool, bool]:
    strategy = {"sharding": sharding, "gradient_merge": {"k_steps": 3}, "clip_norm": True}
    model = net()
    model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), fleet.DistributedStrategy(**strategy))
    _steps(model, face, rank, 0, 4)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=face)
    _steps(model, face, rank, 4, 9)
    other = net()
    other, again = fleet.distribute(other, OPTIMIZERS["adamw"](other.parameters()), fleet.DistributedStrategy(**strategy))
    fleet.load_checkpoint(folder, model=other, optimizer=again)
    _steps(other, again, rank, 4, 9)
    weights = same_bits(list(model.state_dict().values()), list(other.state_dict().values()))
    mine, theirs = face.state_dict(), again.state_dict()
    return weights, all(torch.equal(mine["state"][i][k], theirs["state"][i][k]) for i in mine["state"] for k in mine["state"][i])


def _held(model: nn.Module, face: Any) -> list[Tensor]:
    state = face.state_dict()["state"]
    kept = [value for number in sorted(state) for _, value in sorted(state[number].items()) if isinstance(value, Tensor)]
    return [value.detach().clone() for value in [*model.state_dict().values(), *kept]]


def _load_and_save(rank: int, source: str, target: str, strategy: dict[str, Any]) -> list[Tensor]:
    """Load from `source` if there is anything, else train; save to `target`."""
    warnings.simplefilter("ignore", FleetWarning)
    model = net()
    model, face = fleet.distribute(model, OPTIMIZERS["adam"](model.parameters()), fleet.DistributedStrategy(**strategy))
    if fleet.load_checkpoint(source, model=model, optimizer=face, new_world_size=True) is None:
        _steps(model, face, rank, 0, 3)
    sent = face.pipeline.comm.bytes_sent
    fleet.save_checkpoint(target, step=1, model=model, optimizer=face)
    assert face.pipeline.comm.bytes_sent - sent < 20_000  # words about the state, and no state
    return _held(model, face)


def test_ranks_write_what_they_own_and_any_number_of_them_reads_it_with_the_same_bits(tmp_path: Path) -> None:
    worlds: list[tuple[int, Any]] = [
        (4, {}),
        (3, {"stage": 2}),
        (1, {}),
        (2, {}),
        (4, {"sharding_degree": 2}),
        (2, None),
        (4, {}),
    ]
    held: list[list[Tensor]] = []
    for number, (size, sharding) in enumerate(worlds):
        strategy = {} if sharding is None else {"sharding": sharding}
        folders = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        held += run_ranks(_load_and_save, size, *folders, strategy)
    assert all(same_bits(one, held[0]) for one in held)
    for number, (size, sharding) in enumerate(worlds):
        files = sorted(next((tmp_path / str(number + 1)).glob("step-*")).glob("rank-*.safetensors"))
        state_bytes = sum(param.nbytes for param in net().parameters()) * 3  # of Adam with amsgrad
        divides = size > 1 and sharding is not None
        shares = sharding.get("sharding_degree", size) if divides else 1
        sizes = [file.stat().st_size for file in files if file.stat().st_size > state_bytes / 8] if divides else []
        assert len(sizes) == (shares if divides else 0) and sum(sizes) < (1.3 * state_bytes if divides else 1)


SHARES: dict[str, Any] = {"stage": 2, "merge_sharded": True}


@pytest.mark.parametrize("sharding", [True, SHARES], ids=["buckets", "shares"])
def test_a_resume_in_mid_window_goes_on_to_the_bit(sharding: Any, tmp_path: Path) -> None:
    assert run_ranks(_in_mid_window, 3, str(tmp_path), sharding) == [(True, True)] * 3


def _merged(rank: int, k_steps: int, loop: str, sharding: Any, amp: bool) -> list[Any]:
    model = net()
    strategy: dict[str, Any] = {"gradient_merge": {"k_steps": k_steps}, "clip_norm": {"max_norm": 0.5}}
    strategy |= {"sharding": sharding} if sharding else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # slow on a CPU
        strategy |= {"amp": {"dtype": "float16", "init_loss_scaling": 64}} if amp else {}
        model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), fleet.DistributedStrategy(**strategy))
    whole = []
    for step in range(2 * k_steps + 1):
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x), y)
        if loop == "bare":
            loss.backward()
            face.step()
            face.zero_grad()
        else:
            face.minimize(loss, weight=1.0 + step + rank if loop == "weights" else None)
        whole.append(sum(bucket.wire.untyped_storage().nbytes() for bucket in face.pipeline.buckets))
    report = face.flush()
    return [[value.detach().clone() for value in model.state_dict().values()], whole, report.updated]


@pytest.mark.parametrize(
    ("loop", "size", "amp"), [("minimize", 2, False), ("minimize", 3, True), ("bare", 2, False), ("weights", 2, False)]
)
def test_a_window_that_keeps_shares_alone_trains_as_one_that_reduces_once(loop: str, size: int, amp: bool) -> None:
    plain, ours = run_ranks(_merged, size, 3, loop, None, amp), run_ranks(_merged, size, 3, loop, SHARES, amp)
    for weights, whole, updated in ours:
        close(weights, plain[0][0], 2e-3 if amp else 5e-6)
        assert same_bits(weights, ours[0][0]) and updated and set(whole) == {0}  # no bucket is whole between micro-steps


def _of_another_window(rank: int, folder: str) -> str:
    warnings.simplefilter("ignore", FleetWarning)
    said = ""
    for sharding in (SHARES, {"stage": 2}):
        model = net()
        strategy = fleet.DistributedStrategy(sharding=sharding, gradient_merge={"k_steps": 3})
        model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), strategy)
        if sharding is SHARES:
            _steps(model, face, rank, 0, 4)
            fleet.save_checkpoint(folder, step=4, model=model, optimizer=face)
        else:
            said = raised(lambda model=model, face=face: fleet.load_checkpoint(folder, model=model, optimizer=face))  # type: ignore[misc]
    return said


def test_shares_of_a_window_load_where_shares_are_kept_alone(tmp_path: Path) -> None:
    for said in run_ranks(_of_another_window, 2, str(tmp_path)):
        assert "saved inside a merge window of which each rank keeps its share (merge_sharded)" in said


def _again(rank: int, then: dict[str, Any]) -> list[Tensor]:
    model = net()
    inner = OPTIMIZERS["adamw"](model.parameters())
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(sharding=True))
    _steps(model, face, rank, 0, 2)
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(**then))
    _steps(model, face, rank, 2, 4)
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("then", [{}, {"sharding": True, "fuse_grad_size_in_MB": 0.01}])
def test_a_model_distributed_again_keeps_the_state(then: dict[str, Any]) -> None:
    plain = run_ranks(_train, 2, "adamw", {}, "minimize", 4)
    assert same_bits(run_ranks(_again, 2, then)[0], plain[0]["weights"])


def _asked_by_one(rank: int) -> tuple[bool, bool]:
    model = net()
    inner = OPTIMIZERS["adamw"](model.parameters())
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(sharding=True))
    _steps(model, face, rank, 0, 2)
    with face.state_gathered():
        told = len(face.state_dict()["state"]) if rank == 0 else 0
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy())
    return told == (len(list(model.parameters())) if rank == 0 else 0), torch.save(inner, io.BytesIO()) is None


def test_a_state_that_is_gathered_before_can_be_asked_for_by_one_rank_and_an_ended_pair_lets_copies_go() -> None:
    assert run_ranks(_asked_by_one, 2) == [(True, True)] * 2


def _loaded(rank: int) -> bool:
    model = net()
    inner = OPTIMIZERS["adamw"](model.parameters())
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(sharding=True))
    _steps(model, face, rank, 0, 2)
    state, weights = face.state_dict(), copy.deepcopy(model.state_dict())
    _steps(model, face, rank, 2, 4)
    after = [param.detach().clone() for param in model.parameters()]
    model.load_state_dict(weights)
    face.load_state_dict(state)
    _steps(model, face, rank, 2, 4)
    return same_bits(after, list(model.parameters()))


def test_a_gathered_state_dict_loads_again() -> None:
    assert run_ranks(_loaded, 2) == [True, True]


# --- refusals -----------------------------------------------------------------------------------------------------------


def _refused(rank: int, case: str) -> str:
    model = net()
    params = list(model.parameters())
    strategy: dict[str, Any] = {"sharding": True}
    inner: optim.Optimizer = optim.AdamW(params)
    if case == "optimizer":
        inner = optim.Adafactor(params)
    elif case == "degree":
        strategy = {"sharding": {"sharding_degree": 2}}
    elif case == "localsgd":
        strategy |= {"localsgd": {"k_steps": 2}}
    elif case == "powersgd":
        strategy = {"sharding": {"stage": 2}, "powersgd": True}
    elif case == "merge_sharded":
        strategy = {"sharding": {"merge_sharded": True}}
    elif case == "quantized":
        strategy = {"sharding": SHARES, "quantized_allreduce": True, "gradient_merge": {"k_steps": 2}}
    elif case == "noise":
        strategy = {"sharding": SHARES, "gradient_merge": {"k_steps": 2}, "noise_scale_steps": 1}

    def distribute() -> Any:
        return fleet.distribute(model, inner, fleet.DistributedStrategy(**strategy))

    if case in ("optimizer", "degree", "localsgd", "powersgd", "merge_sharded", "quantized", "noise"):
        return raised(distribute)
    _, face = distribute()
    x, y = batch(0, rank)
    if case == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        return raised(lambda: scaler.step(face))
    if case == "given":
        return raised(inner.state_dict)
    if case == "given saved":
        return raised(lambda: torch.save(inner, io.BytesIO()))
    if case == "copy":
        return raised(lambda: copy.deepcopy(face))
    if case == "hook":
        face.update.register_step_pre_hook(lambda *_: None)
        return raised(lambda: face.minimize(F.cross_entropy(model(x), y)))
    face.minimize(F.cross_entropy(model(x), y))

    def join() -> None:
        face.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        face.minimize(F.cross_entropy(model(x), y))

    return raised(join)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("optimizer", "gives the optimizer parts of tensors, and Adafactor may need them whole"),
        ("degree", 'sharding_configs["sharding_degree"] is 2, and this run has 3 ranks'),
        ("localsgd", "localsgd and sharding both claim `shard`"),
        ("powersgd", "leaves the whole mean on all of them"),
        ("merge_sharded", 'sharding_configs["merge_sharded"] is True, and stage 1 keeps whole gradients'),
        ("quantized", "merge_sharded adds up shares that are reduced in every micro-step, and quantized_allreduce keeps"),
        ("noise", "merge_sharded reduces"),
        ("scaler", "a GradScaler by hand beside strategy.sharding"),
        ("given", "would be this rank's share alone"),
        ("copy", "would hold this rank's share of the state alone"),
        ("given saved", "given to fleet.distribute(...) would hold this rank's share of the state alone"),
        ("hook", "a hook is registered before the optimizer's step"),
        ("join", "under strategy.sharding, which has divided the optimizer's state"),
    ],
)
def test_what_does_not_go_with_it_is_named_on_all_ranks(case: str, words: str) -> None:
    for said in run_ranks(_refused, 3, case):
        assert words in said


# --- what scripts do beside backward and step ---------------------------------------------------------------------------


def _zeroed_in_place(model: nn.Module, face: Any, rank: int, step: int) -> None:
    x, y = batch(step, rank)
    F.cross_entropy(model(x), y).backward()
    face.step()
    face.zero_grad(set_to_none=False)


def _dropped(model: Any, face: Any, rank: int, step: int) -> None:
    x, y = batch(step, rank)
    F.cross_entropy(model(x), y).backward()
    model[4].weight.grad = None
    model[4].bias.grad.zero_()
    face.step()
    face.zero_grad()


def _replaced(model: Any, face: Any, rank: int, step: int) -> None:
    x, y = batch(step, rank)
    F.cross_entropy(model(x), y).backward()
    model[4].weight.grad = torch.full_like(model[4].weight, 0.1)
    face.step()
    face.zero_grad()


def _scaled_by_data(model: nn.Module, face: Any, rank: int, step: int) -> None:
    x, y = batch(step, rank)
    F.cross_entropy(model(x), y).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.data.mul_(0.5 if float(param.grad.detach().norm(2)) > 0.1 else 0.25)
    face.step()
    face.zero_grad()


LOOPS = {"zeroed in place": _zeroed_in_place, "dropped": _dropped, "replaced": _replaced, "scaled by data": _scaled_by_data}


def _loop(rank: int, name: str, strategy: dict[str, Any]) -> list[Tensor]:
    model = net()
    model, face = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**strategy))
    for step in range(4):
        LOOPS[name](model, face, rank, step)
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("name", "beside", "stages"),
    [
        ("zeroed in place", {}, [1, 2]),
        ("zeroed in place", {"powersgd": {"begin_step": 2, "rank": 2}, "clip_norm": {"max_norm": 0.1}}, [1]),
        ("dropped", {"clip_norm": {"max_norm": 0.1}}, [1, 2]),
        ("replaced", {}, [1, 2]),
        ("scaled by data", {}, [1, 2]),
    ],
)
def test_gradients_that_a_script_changes_train_as_without_it(name: str, beside: dict[str, Any], stages: list[int]) -> None:
    plain = run_ranks(_loop, 2, name, beside)
    for stage in stages:
        _same_on_both(run_ranks(_loop, 2, name, {**beside, "sharding": {"stage": stage}}), plain)


def _same_on_both(ours: list[list[Tensor]], plain: list[list[Tensor]]) -> None:
    assert same_bits(ours[0], ours[1])
    close(ours[0], plain[0], 2e-6)


def _gan(rank: int, strategy: dict[str, Any], by_model: bool) -> list[Tensor]:
    """The usual loop: the generator's loss leaves gradients in the discriminator, which zero_grad() drops."""
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    maker, making = fleet.distribute(maker, OPTIMIZERS["adamw"](maker.parameters()), fleet.DistributedStrategy(**strategy))
    judge, judging = fleet.distribute(judge, OPTIMIZERS["adamw"](judge.parameters()), fleet.DistributedStrategy(**strategy))
    for step in range(4):
        generator = torch.Generator().manual_seed(7 * step + rank)
        noise, real = torch.randn(5, 4, generator=generator), torch.randn(5, 8, generator=generator)
        (judge if by_model else judging).zero_grad()
        F.softplus(-judge(real)).mean().backward()
        F.softplus(judge(maker(noise).detach())).mean().backward()
        judging.step()
        (maker if by_model else making).zero_grad()
        F.softplus(-judge(maker(noise))).mean().backward()
        making.step()
    return [value.detach().clone() for model in (maker, judge) for value in model.state_dict().values()]


@pytest.mark.parametrize(("by_model", "stage"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_two_sharded_pairs_train_as_a_gan_does_without_it(by_model: bool, stage: int) -> None:
    plain, ours = run_ranks(_gan, 2, {}, by_model), run_ranks(_gan, 2, {"sharding": {"stage": stage}}, by_model)
    assert same_bits(ours[0], ours[1])
    close(ours[0], plain[0], 2e-6)


def _read_by_keyword(rank: int) -> list[str]:
    model = net()
    model, _ = fleet.distribute(model, optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(sharding=True))
    x, y = batch(0, rank)
    F.cross_entropy(model(x), y).backward()
    grad, other = model[4].weight.grad, torch.zeros(37, 192)
    assert grad is not None
    return [
        raised(lambda: torch.sum(input=grad)),
        raised(lambda: other.add_(other=grad)),
        raised(lambda: torch.stack(tensors=[grad])),
        raised(lambda: torch.ones(37, 192).mul_(grad)),
    ]


def test_a_gradient_given_by_keyword_or_as_a_factor_is_refused_too() -> None:
    for said in run_ranks(_read_by_keyword, 2)[0]:
        assert "has the mean of its share of it alone" in said


def _versions_and_hooks(rank: int) -> tuple[list[bool], list[int], str]:
    model = net()
    inner = optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    inner.register_step_post_hook(lambda o, *_: seen.append(sum(p.numel() for g in o.param_groups for p in g["params"])))
    strategy = fleet.DistributedStrategy(sharding=True, fuse_grad_size_in_MB=0.001)
    model, face = fleet.distribute(model, inner, strategy)
    before = [param._version for param in model.parameters()]
    x, y = batch(0, rank)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    face.step()
    changed = [param._version > old for param, old in zip(model.parameters(), before, strict=True)]
    return changed, seen, raised(loss.backward)


def test_after_an_update_older_graphs_are_refused_and_post_hooks_see_whole_parameters() -> None:
    whole = sum(param.numel() for param in net().parameters())
    for changed, seen, said in run_ranks(_versions_and_hooks, 2):
        assert all(changed) and seen == [whole]
        assert "modified by an inplace operation" in said


def _by_hand(rank: int, case: str) -> str:
    model = net().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), fleet.DistributedStrategy(sharding=True))
    if case == "format":
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of gradients that are laid out otherwise
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif rank == 1:
        model[4].weight.data.mul_(2)
    x, y = batch(0, rank)
    return raised(lambda: face.minimize(F.cross_entropy(model(x), y)))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("format", "`0.weight` is laid out otherwise in memory"),
        ("one rank", "after fleet.distribute(...) the ranks no longer hold the same model. Unlike rank 0: rank 1 in 4.weight"),
    ],
)
def test_weights_that_one_rank_changed_or_all_laid_out_otherwise_are_found_before_the_first_update(case: str, words: str) -> None:
    for said in run_ranks(_by_hand, 2, case):
        assert words in said


class EmptyLast(nn.Module):
    """The layer that is registered last has no elements: it is the first of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(40, 40)
        self.empty = nn.ParameterList([torch.empty(0), torch.empty(0, dtype=torch.float64)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().sum() + sum(one.sum().float() for one in self.empty)


def _empty(rank: int, strategy: dict[str, Any]) -> list[Tensor]:
    model = EmptyLast()
    model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), fleet.DistributedStrategy(**strategy))
    for _ in range(2):
        face.minimize(model(torch.ones(2, 40) + rank))
    return list(model.state_dict().values())


def test_parameters_without_elements_do_no_harm() -> None:
    assert same_bits(run_ranks(_empty, 2, {"sharding": True})[0], run_ranks(_empty, 2, {})[0])


def _ended(rank: int) -> tuple[bool, str]:
    model = net()
    first = OPTIMIZERS["adamw"](model.parameters())
    model, face = fleet.distribute(model, first, fleet.DistributedStrategy(sharding=True))
    x, y = batch(0, rank)
    face.minimize(F.cross_entropy(model(x), y))
    bucket = weakref.ref(next(iter(face.pipeline.buckets)))
    model, face = fleet.distribute(model, OPTIMIZERS["adamw"](model.parameters()), fleet.DistributedStrategy())
    gc.collect()
    return bucket() is None, raised(first.step)


def test_an_ended_pair_keeps_no_buckets_and_its_optimizer_does_not_step_by_a_share() -> None:
    for is_gone, said in run_ranks(_ended, 2):
        assert is_gone and "has this rank's share of its state alone" in said


def _auto_beside(rank: int) -> list[Tensor]:
    model, sample = net(), batch(0, rank)
    strategy = fleet.DistributedStrategy(sharding=True, auto=True)

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        return F.cross_entropy(model(given[0]), given[1])

    inner = OPTIMIZERS["adamw"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of timings on a busy machine
        model, face = fleet.distribute(model, inner, strategy, sample=sample, loss_fn=loss_fn)
    face.minimize(loss_fn(model, sample))
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.campaign
def test_auto_plans_around_it() -> None:
    first, second = run_ranks(_auto_beside, 2)
    assert same_bits(first, second)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(14) for m in (nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 4))


def _under_a_limit(rank: int, share_of_weights: float) -> tuple[str, int, dict[str, str]]:
    warnings.simplefilter("ignore")
    model = deep()
    limit = int(share_of_weights * sum(param.nbytes for param in model.parameters()))
    sample = (torch.randn(4, 96, generator=torch.Generator().manual_seed(rank)), torch.zeros(4, dtype=torch.long))
    strategy = fleet.DistributedStrategy(auto=True, auto_configs={"memory": limit, "trials": 1}, fuse_grad_size_in_MB=0.04)
    with short_measuring():
        _, face = fleet.distribute(
            model, optim.AdamW(model.parameters()), strategy, sample=sample, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])
        )
    row = face.plan.row(face.plan.chosen)
    return face.plan.chosen, row.measured_bytes - limit, dict(face.plan.rejected)


def test_auto_finds_it_where_nothing_else_keeps_to_the_memory() -> None:
    # Weights, gradients and Adam's state are 4 times the weights; a step of so few rows adds little, and recompute saves less.
    chosen, over, _ = run_ranks(_under_a_limit, 2, 3.95)[0]
    assert chosen.endswith(", sharding") and over <= 0
    chosen, _, rejected = run_ranks(_under_a_limit, 2, 40.0)[0]
    assert "sharding" not in chosen and rejected["sharding"].startswith("not needed: a step takes ")

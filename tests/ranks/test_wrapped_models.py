"""Models that are in DistributedDataParallel already: DDP reduces, the rest is ours; what claims `reduce` is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp

DDP = nn.parallel.DistributedDataParallel
STEPS = 8
MODELS: dict[str, Any] = {"mlp": (mlp, (8,)), "cnn": (cnn, (1, 6, 6))}


def strategy_of(**settings: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(fuse_grad_size_in_MB=0.001, **settings)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _loss(model: nn.Module, index: int, shape: tuple[int, ...]) -> Tensor:
    x, y = batch(index, shape=shape)
    return F.cross_entropy(model(x), y)


def _train(rank: int, name: str, settings: dict[str, Any], wrap: dict[str, Any] | None, how: str = "minimize") -> Tensor:
    """Parameters and buffers after some updates, of a model that was wrapped or not."""
    make, shape = MODELS[name]
    model: nn.Module = make()
    inner = model
    if wrap is not None:
        model = DDP(model, **wrap)
    optimizer: torch.optim.Optimizer = sgd(model)
    if "lamb" in settings:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    model, ours = fleet.distribute(model, optimizer, strategy_of(**settings))
    micro_steps = settings.get("gradient_merge_configs", {}).get("k_steps", 1)
    for index in range(STEPS * micro_steps):
        loss = _loss(model, index * 4 + rank, shape)
        if how == "minimize":
            ours.minimize(loss)
        elif how == "backward":
            ours.backward(loss)
            ours.step()
            ours.zero_grad()
        else:
            loss.backward()
            ours.step()
            ours.zero_grad()
    return flat_state(inner)


def _train_with_plain_torch(rank: int, wrap: dict[str, Any]) -> Tensor:
    model = DDP(mlp(), **wrap)
    optimizer = sgd(model)
    for index in range(STEPS):
        _loss(model, index * 4 + rank, (8,)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_state(model.module)


# --- the same results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.001}],
    ids=lambda wrap: ",".join(wrap) or "plain",
)
def test_a_plain_strategy_gives_the_bits_of_ddp_and_plain_torch(wrap: dict[str, Any]) -> None:
    theirs = run_ranks(_train_with_plain_torch, 2, wrap)
    for how in ("minimize", "backward", "bare"):
        ours = run_ranks(_train, 2, "mlp", {}, wrap, how)
        for rank in range(2):
            torch.testing.assert_close(ours[rank], theirs[0], rtol=0, atol=0, msg=how)


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "merge": MERGE,
    "merge_lars_clip": MERGE | {"lars": True, "clip_norm": True, "clip_norm_configs": {"max_norm": 0.1}},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["0", "3"]}},
    "sync_batch_norm": {"sync_batch_norm": True},
    "amp_fp16": {"amp": True, "amp_configs": {"dtype": "float16"}},
    "merge_fp16": MERGE | {"amp": True, "amp_configs": {"dtype": "float16"}},
    "guards": {"on_nan_inf": "skip", "desync_check_steps": 2},
}


def _train_all(rank: int, wrap: dict[str, Any] | None, how: str) -> dict[str, Tensor]:
    import warnings

    warnings.filterwarnings("ignore", message="amp:")
    bare_allowed = {name: s for name, s in SETTINGS.items() if how != "bare" or "fp16" not in name}
    return {name: _train(rank, "cnn", settings, wrap, how) for name, settings in bare_allowed.items()}


@pytest.mark.parametrize("how", ["minimize", "bare"])
def test_every_other_part_gives_what_it_gives_on_the_bare_module(how: str) -> None:
    bare = run_ranks(_train_all, 2, None, how)
    for wrap in ({}, {"gradient_as_bucket_view": True}):
        wrapped = run_ranks(_train_all, 2, wrap, how)
        for name in bare[0]:
            torch.testing.assert_close(wrapped[0][name], wrapped[1][name], rtol=0, atol=0, msg=f"ranks differ: {name} {wrap}")
            # Another order of the same sums, one bit apart, is seen by the float16 forward of the next step.
            limit = 2e-3 if name == "merge_fp16" else 1e-6
            torch.testing.assert_close(wrapped[0][name], bare[0][name], rtol=limit, atol=limit, msg=f"{name} {wrap}")


def _train_with_no_sync(rank: int, wrap: dict[str, Any], leaves_out: bool) -> Tensor:
    model: nn.Module = DDP(mlp(), **wrap)
    model, optimizer = fleet.distribute(model, sgd(model), strategy_of(**MERGE))
    for index in range(STEPS * 3):
        if leaves_out and index % 3 < 2:
            with model.no_sync():  # type: ignore[operator]
                optimizer.minimize(_loss(model, index * 4 + rank, (8,)))
        else:
            optimizer.minimize(_loss(model, index * 4 + rank, (8,)))
    return flat_state(model)


@pytest.mark.parametrize("as_view", [False, True])
def test_merging_is_right_with_and_without_no_sync(as_view: bool) -> None:
    wrap = {"gradient_as_bucket_view": as_view}
    with_it = run_ranks(_train_with_no_sync, 2, wrap, True)
    without = run_ranks(_train_with_no_sync, 2, wrap, False)
    torch.testing.assert_close(with_it[0], with_it[1], rtol=0, atol=0)
    torch.testing.assert_close(with_it[0], without[0], rtol=1e-6, atol=1e-6)


def _weighted(rank: int, is_wrapped: bool) -> Tensor:
    model: nn.Module = DDP(mlp()) if is_wrapped else mlp()
    model, optimizer = fleet.distribute(model, sgd(model), strategy_of(**MERGE))
    for index in range(STEPS * 3):
        optimizer.minimize(_loss(model, index * 4 + rank, (8,)), weight=1 + index % 3 + 2 * rank)
    return flat_state(model)


def test_weights_of_micro_batches_count_as_on_the_bare_module() -> None:
    torch.testing.assert_close(run_ranks(_weighted, 2, True)[0], run_ranks(_weighted, 2, False)[0], rtol=1e-6, atol=1e-6)


def _zeroed(rank: int, wrap: dict[str, Any], zeroes: bool) -> Tensor:
    model: nn.Module = DDP(mlp(), **wrap)
    model, optimizer = fleet.distribute(model, sgd(model), strategy_of(**MERGE))
    for index in range(STEPS * 3):
        _loss(model, index * 4 + rank, (8,)).backward()
        optimizer.step()
        if zeroes:
            model.zero_grad()
        optimizer.zero_grad()
    return flat_state(model)


@pytest.mark.parametrize("as_view", [False, True])
def test_zeroing_the_models_gradients_in_a_window_loses_nothing(as_view: bool) -> None:
    wrap = {"gradient_as_bucket_view": as_view}
    torch.testing.assert_close(run_ranks(_zeroed, 2, wrap, True), run_ranks(_zeroed, 2, wrap, False), rtol=0, atol=0)


class Branches(nn.Module):
    """Rank 0 uses the left branch, rank 1 the right one; no rank uses the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.idle = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, use_left: bool) -> Tensor:
        out: Tensor = self.left(x) if use_left else self.right(x)
        return out


def _unused(rank: int, wrap: dict[str, Any] | None, how: str) -> Tensor:
    model: nn.Module = Branches() if wrap is None else DDP(Branches(), find_unused_parameters=True, **wrap)
    model, optimizer = fleet.distribute(model, sgd(model), strategy_of(find_unused_parameters=wrap is None))
    for index in range(STEPS):
        x, y = batch(index * 4 + rank)
        loss = F.cross_entropy(model(x, rank == 0), y)
        if how == "minimize":
            optimizer.minimize(loss)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=how == "none")
    return flat_state(model)


@pytest.mark.parametrize("how", ["minimize", "none", "zeros"])
def test_parameters_that_one_rank_or_none_uses_follow_the_wrappers_own_setting(how: str) -> None:
    bare = run_ranks(_unused, 2, None, "minimize")[0]
    for wrap in ({}, {"gradient_as_bucket_view": True}):
        wrapped = run_ranks(_unused, 2, wrap, how)
        torch.testing.assert_close(wrapped[0], wrapped[1], rtol=0, atol=0)
        torch.testing.assert_close(wrapped[0], bare, rtol=1e-6, atol=1e-6)


def _with_comm_hook(rank: int) -> tuple[int, bool]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    calls = []

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations as objects
        calls.append(bucket.index())
        return fp16_compress_hook(state, bucket)

    model: nn.Module = DDP(mlp())
    model.register_comm_hook(None, hook)  # type: ignore[operator]
    model, optimizer = fleet.distribute(model, sgd(model), strategy_of(lars=True))
    optimizer.backward(_loss(model, rank, (8,)))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return len(calls), all(bool((g == g.half().float()).all()) for g in gradients)


def test_a_comm_hook_of_the_users_is_honoured() -> None:
    assert run_ranks(_with_comm_hook, 2) == [(1, True), (1, True)]


def _reports(rank: int) -> dict[str, Any]:
    model: nn.Module = DDP(mlp())
    inner = model.module
    same, optimizer = fleet.distribute(model, sgd(model), strategy_of(**MERGE, desync_check_steps=0))
    due, sent = [], []
    for index in range(6):
        report = optimizer.minimize(_loss(model, index * 4 + rank, (8,)))
        due.append(report.due)
        sent.append(report.bytes_sent)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    return {
        "same": same is model and model.module is inner,
        "keys": next(iter(model.state_dict())),
        "due": due,
        "in_window": sent[3] == gradient_bytes,  # of 2 ranks: 2(N-1)/N = 1
        "closing": gradient_bytes < sent[5] < gradient_bytes + 100,
    }


def test_the_wrapper_comes_back_and_the_report_counts_what_ddp_sends() -> None:
    told = run_ranks(_reports, 2)[0]
    assert told == {
        "same": True,
        "keys": "module.0.weight",
        "due": [False, False, True] * 2,
        "in_window": True,
        "closing": True,
    }


def _resumed(rank: int, folder: str, stops: bool) -> Tensor:
    def fresh() -> tuple[nn.Module, Any]:
        model: nn.Module = DDP(cnn())
        return fleet.distribute(model, sgd(model), strategy_of(**MERGE))

    model, optimizer = fresh()
    for index in range(10):
        optimizer.minimize(_loss(model, index * 4 + rank, (1, 6, 6)))
        if stops and index == 4:  # in the middle of a window
            fleet.save_checkpoint(folder, step=index, model=model, optimizer=optimizer)
            model, optimizer = fresh()
            fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    return flat_state(model)


def test_a_run_resumed_in_mid_window_goes_on_to_the_bit(tmp_path: Any) -> None:
    straight = run_ranks(_resumed, 2, str(tmp_path), False)
    resumed = run_ranks(_resumed, 2, str(tmp_path), True)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


# --- what is refused ------------------------------------------------------------------------------------------------------

CLAIMANTS = ["localsgd", "adaptive_localsgd", "dgc", "powersgd", "fp16_allreduce", "bf16_allreduce"]


def _refusals(rank: int) -> dict[str, str]:
    def told(model: nn.Module, **settings: Any) -> str:
        return raised(lambda: fleet.distribute(model, sgd(model), strategy_of(**settings)))

    def sampled() -> Any:
        model = DDP(mlp())
        return fleet.distribute(model, sgd(model), strategy_of(), sample=batch(0))

    norms = DDP(cnn(), find_unused_parameters=True)
    return {name: told(DDP(mlp()), **{name: True}) for name in CLAIMANTS} | {
        "two": told(DDP(mlp()), dgc=True, lars=True, powersgd=True),
        "noise": told(DDP(mlp()), noise_scale_steps=1),
        "deeper": told(nn.Sequential(DDP(mlp()), nn.Linear(4, 4))),
        "sample": raised(sampled),
        "norms": told(norms, sync_batch_norm=True),
    }


def test_parts_that_claim_reduce_are_refused_by_name_with_the_way_around_the_wrapper() -> None:
    for told in run_ranks(_refusals, 2):
        for name in CLAIMANTS:
            assert told[name].startswith(f"StrategyConflict: {name} claims `reduce`, which DistributedDataParallel already does")
            for way in ("DDP(module)", "accelerate.Accelerator", "FleetTrainer", "FleetStrategy", "parallel_strategy=None"):
                assert way in told[name]
        assert "dgc and lars both claim `momentum`" in told["two"]
        assert "dgc and powersgd claim `reduce`, which DistributedDataParallel" in told["two"]
        assert "noise_scale_steps is 1" in told["noise"] and "bare module" in told["noise"]
        assert "already distributed (DistributedDataParallel)" in told["deeper"]
        assert "steps of a sample" in told["sample"]
        assert "sync_batch_norm has collectives of its own in backward" in told["norms"]


def _misuses(rank: int) -> dict[str, str]:
    def pair() -> tuple[Any, Any]:
        model: nn.Module = DDP(mlp())
        return fleet.distribute(model, sgd(model), strategy_of())

    def past_the_wrapper() -> None:
        model, optimizer = pair()
        optimizer.minimize(_loss(model.module, rank, (8,)))

    def inside_no_sync() -> None:
        model, optimizer = pair()
        with model.no_sync():
            optimizer.minimize(_loss(model, rank, (8,)))

    def unused() -> None:
        model = DDP(Branches())
        _, optimizer = fleet.distribute(model, sgd(model), strategy_of())
        x, y = batch(rank)
        optimizer.minimize(F.cross_entropy(model(x, True), y))

    def unfrozen_behind_its_back() -> None:
        inner = mlp()
        inner[0].weight.requires_grad_(False)
        model = DDP(inner)
        inner[0].weight.requires_grad_(True)
        _, optimizer = fleet.distribute(model, sgd(model), strategy_of())
        optimizer.minimize(_loss(model, rank, (8,)))

    def zeroed_in_a_window() -> None:
        model: nn.Module = DDP(mlp())
        model, optimizer = fleet.distribute(model, sgd(model), strategy_of(**MERGE))
        for index in range(2):
            loss = _loss(model, index + rank, (8,))
            model.zero_grad()  # after the forward: too late to be corrected
            loss.backward()
            optimizer.step()

    calls = [past_the_wrapper, inside_no_sync, unused, unfrozen_behind_its_back, zeroed_in_a_window]
    return {call.__name__: raised(call) for call in calls}


def test_what_ddp_would_train_unsynchronised_without_a_word_is_an_error() -> None:
    for told in run_ranks(_misuses, 2):
        assert "did not come from the DistributedDataParallel wrapper" in told["past_the_wrapper"]
        assert "model.no_sync()" in told["inside_no_sync"]
        assert "got no gradient" in told["unused"] and "find_unused_parameters=True" in told["unused"]
        assert "different gradients of `0.weight`" in told["unfrozen_behind_its_back"]
        assert "inside a merge window" in told["zeroed_in_a_window"]

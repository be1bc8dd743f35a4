"""Sharding of stage 3, by torch's fully_shard: the numbers of plain training and of FSDP2 itself, beside other parts, saved and
loaded, and what it is refused with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import ConfigError, FleetWarning
from fleetx.integrations.refusals import refuse_divided_weights
from tests.helpers.harness import raised, run_ranks

THREE: dict[str, Any] = {"sharding": {"stage": 3}}


class Net(nn.Module):
    """Repeated blocks, rows that no number of ranks divides, a bias of one element, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(9, 11, bias=False)
        self.norm = nn.BatchNorm1d(11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 9, generator=generator), torch.randn(6, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return F.mse_loss(model(x), y)


def optimizer_of(kind: str, params: Any) -> optim.Optimizer:
    if kind == "adamw":
        return optim.AdamW(params, lr=0.01, weight_decay=0.0)
    return optim.SGD(params, lr=0.05, momentum=0.9)


def by_user(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> list[Tensor]:
    state = model.state_dict().values()
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in state]


def _train(rank: int, kind: str, strategy: dict[str, Any], loop: str = "minimize", user: bool = False, steps: int = 6) -> Any:
    warnings.simplefilter("ignore", FleetWarning)
    model: nn.Module = Net()
    if user:
        model = by_user(model)
    model, face = fleet.distribute(model, optimizer_of(kind, model.parameters()), fleet.DistributedStrategy(**strategy))
    reports: list[Any] = []
    for step in range(steps):
        loss = loss_of(model, step, rank)
        if loop == "minimize":
            reports.append(face.minimize(loss))
            continue
        if loop == "backward":
            face.backward(loss)
        else:
            loss.backward()
        if loop == "clip" and face.due:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if loop == "twice":
            (0.5 * loss_of(model, step + 50, rank)).backward()
        reports.append(face.step())
        (model if loop == "model.zero_grad" else face).zero_grad()
        with torch.no_grad():
            model.eval()
            model(torch.ones(2, 9))  # leaves the root's weights gathered
            model.train()
    state = face.state_dict()
    return {
        "weights": whole(model),
        "state": [v for number in sorted(state["state"]) for _, v in sorted(state["state"][number].items()) if v is not None],
        "norms": [report.grad_norm for report in reports],
        "losses": [report.loss for report in reports],
        "held": sum(v.numel() for held in face.state.values() for v in held.values() if isinstance(v, Tensor)),
        "sent": reports[-1].bytes_sent,
    }


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-5) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "adamw": ("adamw", {}),
    "lars": ("sgd", {"lars": {"lars_coeff": 0.02}}),
    "lamb": ("adamw", {"lamb": True}),
    "lamb, clipped": ("adamw", {"lamb": {"always_adapt": True}, "clip_norm": {"max_norm": 0.2}}),
    "clip": ("sgd", {"clip_norm": {"max_norm": 0.2}}),
    "merge": ("adamw", {"gradient_merge": {"k_steps": 2}, "clip_norm": {"max_norm": 0.2}}),
    "merge, summed": ("sgd", {"gradient_merge": {"k_steps": 3, "avg": False}}),
    "recompute": ("adamw", {"recompute": {"checkpoints": ["blocks.*"]}}),
    "small buckets": ("adamw", {"fuse_grad_size_in_MB": 0.0002}),
    "unused": ("adamw", {"find_unused_parameters": True}),
}


@pytest.mark.parametrize("name", PARTS)
def test_it_trains_as_without_it(name: str) -> None:
    kind, strategy = PARTS[name]
    plain, ours = run_ranks(_train, 2, kind, strategy), run_ranks(_train, 2, kind, strategy | THREE)
    close(ours[0]["weights"], plain[0]["weights"])
    close(ours[0]["state"], plain[0]["state"])
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)
    assert ours[0]["held"] + ours[1]["held"] < 1.1 * plain[0]["held"] + 40
    if "clip_norm" in strategy:
        assert ours[0]["norms"] == ours[1]["norms"]
        for mine, theirs in zip(ours[0]["norms"], plain[0]["norms"], strict=True):
            assert mine == (None if theirs is None else pytest.approx(theirs, rel=1e-4))


@pytest.mark.parametrize("loop", ["backward", "bare", "clip", "twice", "model.zero_grad"])
@pytest.mark.parametrize("strategy", [{}, {"gradient_merge": {"k_steps": 2}}], ids=["each", "merged"])
def test_an_unchanged_loop_trains_as_without_it(loop: str, strategy: dict[str, Any]) -> None:
    plain = run_ranks(_train, 2, "adamw", strategy, loop)
    close(run_ranks(_train, 2, "adamw", strategy | THREE, loop)[0]["weights"], plain[0]["weights"])


@pytest.mark.parametrize("size", [1, 3])
def test_any_number_of_ranks_divides_rows_that_it_does_not_divide_evenly(size: int) -> None:
    plain, ours = run_ranks(_train, size, "adamw", {"lamb": True}), run_ranks(_train, size, "adamw", {"lamb": True} | THREE)
    for one in ours:
        close(one["weights"], plain[0]["weights"])
        close(one["state"], plain[0]["state"])


def test_sets_of_neighbours_train_as_all_ranks_together() -> None:
    strategy = {"clip_norm": {"max_norm": 0.2}}
    ours = run_ranks(_train, 4, "adamw", strategy | {"sharding": {"stage": 3, "sharding_degree": 2}})
    close(ours[0]["weights"], run_ranks(_train, 4, "adamw", strategy)[0]["weights"])
    assert all(torch.equal(a, b) for one in ours for a, b in zip(one["weights"], ours[0]["weights"], strict=True))


def _plain_fsdp(rank: int, steps: int = 6) -> list[Tensor]:
    model: Any = by_user(Net())
    optimizer = optimizer_of("adamw", model.parameters())
    for step in range(steps):
        loss_of(model, step, rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]


def _ours_by_user(rank: int, strategy: dict[str, Any], steps: int = 6) -> list[Tensor]:
    model: Any = by_user(Net())
    inner = optimizer_of("adamw", model.parameters())
    with torch.no_grad():
        model.eval()(torch.ones(2, 9))  # leaves the root's weights gathered
    model, face = fleet.distribute(model.train(), inner, fleet.DistributedStrategy(**strategy))
    for step in range(steps):
        face.minimize(loss_of(model, step, rank))
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_the_user_has_sharded_trains_as_under_fsdp_itself(named: bool) -> None:
    theirs = run_ranks(_plain_fsdp, 2)
    ours = run_ranks(_ours_by_user, 2, {"clip_norm": {"max_norm": 0.2}} | (THREE if named else {}))
    close(ours[0], theirs[0])


# --- precision, losses that are not finite, weights of micro-batches --------------------------------------------------------


def _amp(rank: int, dtype: str, strategy: dict[str, Any]) -> list[Any]:
    model: nn.Module = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # slow on a CPU
        settings = {"dtype": dtype, "init_loss_scaling": 1024, "decr_every_n_nan_or_inf": 1}
        chosen = fleet.DistributedStrategy(amp=settings, **strategy)
        model, face = fleet.distribute(model, optimizer_of("adamw", model.parameters()), chosen)
    told: list[Any] = []
    for step in range(6):
        loss = loss_of(model, step, rank)
        report = face.minimize(loss * (float("inf") if dtype == "float16" and rank == 1 and step % 2 else 1.0))
        told += [report.updated, report.loss_scale]
    return [told, whole(model)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_amp_an_overflow_on_one_rank_is_agreed_on_by_all(dtype: str) -> None:
    ours, plain = run_ranks(_amp, 2, dtype, THREE), run_ranks(_amp, 2, dtype, {})
    assert ours[0][0] == ours[1][0] == plain[0][0]
    assert ours[0][0][::2] == ([True, False] * 3 if dtype == "float16" else [True] * 6)
    close(ours[0][1], plain[0][1], 2e-3)  # 16-bit sums


def _nan(rank: int, mode: str) -> list[Any]:
    warnings.simplefilter("ignore", FleetWarning)
    model: nn.Module = Net()
    chosen = fleet.DistributedStrategy(on_nan_inf=mode, **THREE)
    model, face = fleet.distribute(model, optimizer_of("adamw", model.parameters()), chosen)
    before = whole(model)[0]
    loss = loss_of(model, 0, rank) + (model.last.bias.sum() * 0.0)  # type: ignore[union-attr, operator]
    said = raised(lambda: face.minimize(loss * (float("nan") if rank == 1 else 1.0)))
    return [said, torch.equal(before, whole(model)[0]), face.skipped]


def test_a_nan_on_one_rank_stops_or_skips_on_all() -> None:
    stopped, skipped = run_ranks(_nan, 2, "stop"), run_ranks(_nan, 2, "skip")
    assert stopped[0] == stopped[1] and "update 1 was not made" in stopped[0][0] and "last.bias" in stopped[0][0]
    assert skipped == [["nothing raised", True, 1]] * 2 and stopped[0][1]


def _weighed(rank: int, strategy: dict[str, Any]) -> list[Tensor]:
    model: nn.Module = Net()
    chosen = fleet.DistributedStrategy(gradient_merge={"k_steps": 2}, **strategy)
    model, face = fleet.distribute(model, optimizer_of("sgd", model.parameters()), chosen)
    for step in range(4):
        face.minimize(loss_of(model, step, rank), weight=1 + rank + step)
    return whole(model)


def test_weights_of_micro_batches_make_the_weighted_mean() -> None:
    close(run_ranks(_weighed, 2, THREE)[0], run_ranks(_weighed, 2, {})[0])


# --- checkpoints ------------------------------------------------------------------------------------------------------------


def _pair(strategy: dict[str, Any], lr: float = 0.01) -> tuple[Any, Any]:
    model: Any = Net()
    inner = optim.AdamW(model.parameters(), lr=lr)
    return fleet.distribute(model, inner, fleet.DistributedStrategy(desync_check_steps=0, **strategy))


def _save(rank: int, folder: str, strategy: dict[str, Any]) -> list[Tensor]:
    warnings.simplefilter("ignore", FleetWarning)  # all ranks have the same samples
    model, face = _pair(strategy)
    for step in range(3):
        face.minimize(loss_of(model, step, 0))
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=face, async_save=True).wait()
    fleet.save_model(Path(folder) / "model.safetensors", model, face)
    return whole(model) + [value.clone() for value in face.state_dict()["state"][0].values()]


def _load(rank: int, folder: str, strategy: dict[str, Any]) -> list[Tensor]:
    warnings.simplefilter("ignore", FleetWarning)
    model, face = _pair(strategy, lr=0.5)
    assert fleet.load_checkpoint(folder, model=model, optimizer=face, new_world_size=True) is not None
    found = whole(model) + [value.clone() for value in face.state_dict()["state"][0].values()]
    face.minimize(loss_of(model, 3, 0))
    return found


@pytest.mark.parametrize(
    ("saved_on", "saved", "loaded_on", "loaded"),
    [(2, THREE, 2, THREE), (4, THREE, 3, THREE), (2, THREE, 1, {}), (2, THREE, 2, {"sharding": True}), (2, {}, 3, THREE)],
)
def test_a_checkpoint_loads_on_any_number_of_ranks_sharded_or_not_with_the_same_bits(
    saved_on: int, saved: dict[str, Any], loaded_on: int, loaded: dict[str, Any], tmp_path: Path
) -> None:
    before = run_ranks(_save, saved_on, str(tmp_path), saved)
    for after in run_ranks(_load, loaded_on, str(tmp_path), loaded):
        assert len(after) == len(before[0]) and all(torch.equal(a, b) for a, b in zip(after, before[0], strict=True))
    plain = Net()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), before[0], strict=False))


def _in_mid_window(rank: int, folder: str) -> bool:
    strategy = THREE | {"gradient_merge": {"k_steps": 3}, "clip_norm": True}
    model, face = _pair(strategy)
    for step in range(4):
        face.minimize(loss_of(model, step, rank))
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=face)
    for step in range(4, 9):
        face.minimize(loss_of(model, step, rank))
    went_on = whole(model)
    fleet.load_checkpoint(folder, model=model, optimizer=face)
    for step in range(4, 9):
        face.minimize(loss_of(model, step, rank))
    return all(torch.equal(a, b) for a, b in zip(went_on, whole(model), strict=True))


def test_a_resume_in_mid_window_goes_on_to_the_bit(tmp_path: Path) -> None:
    assert run_ranks(_in_mid_window, 2, str(tmp_path)) == [True, True]


def _again(rank: int) -> list[Tensor]:
    model: Any = Net()
    inner = optimizer_of("adamw", model.parameters())
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy(**THREE))
    for step in range(2):
        face.minimize(loss_of(model, step, rank))
    state, weights = face.state_dict(), model.state_dict()
    saved = {name: value.clone() for name, value in weights.items()}
    face.minimize(loss_of(model, 2, rank))
    model.load_state_dict(saved)
    face.load_state_dict(state)
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy())
    for step in range(2, 6):
        face.minimize(loss_of(model, step, rank))
    return whole(model)


def test_states_load_again_and_a_model_distributed_again_keeps_them() -> None:
    close(run_ranks(_again, 2)[0], run_ranks(_train, 2, "adamw", {})[0]["weights"])


# --- what it sends, what a run sees, and refusals -----------------------------------------------------------------------------


def _sent(rank: int, folder: str) -> tuple[int, int]:
    model, face = _pair(THREE)
    face.minimize(loss_of(model, 0, rank))
    report = face.minimize(loss_of(model, 1, rank))
    with fleet.Monitor(folder, show=False) as monitor:
        monitor.log(face.minimize(loss_of(model, 2, rank)))
    return report.bytes_sent, report.bytes_dense


def test_a_step_sends_half_as_much_again_as_an_all_reduce(tmp_path: Path) -> None:
    sent, dense = run_ranks(_sent, 2, str(tmp_path))[0]
    assert dense == sum(param.numel() * 4 for param in Net().parameters())
    assert dense < sent < 1.9 * dense  # beside the gradients: flags and statistics of a small net


def _refused(rank: int, case: str) -> str:
    warnings.simplefilter("ignore", FleetWarning)
    model: Any = Net()
    strategy: dict[str, Any] = dict(THREE)
    sample = None
    if case in ("stage", "part left out", "sample"):
        if case == "part left out":
            by_user(model)
            model.extra = nn.Linear(2, 2)
        else:
            by_user(model)
        strategy = {"sharding": {"stage": 2}} if case == "stage" else {}
        sample = batch(0, 0) if case == "sample" else None
    elif case == "scalar":
        model.scale = nn.Parameter(torch.tensor(1.0))
    elif case == "types":
        model.last.double()
    elif case == "Adafactor":
        pass
    elif case == "budget":
        strategy |= {"recompute": {"budget": "1GB"}}
        sample = batch(0, 0)
    elif case == "noise":
        strategy |= {"noise_scale_steps": 1, "gradient_merge": {"k_steps": 2}}
    elif case not in ("scaler", "second", "hook", "given", "reopened"):
        strategy |= {case: True}
    kind = optim.Adafactor if case == "Adafactor" else optim.SGD if case == "dgc" else optim.AdamW
    inner = kind(model.parameters(), lr=0.1)

    def distribute() -> Any:
        return fleet.distribute(
            model, inner, fleet.DistributedStrategy(**strategy), sample=sample, loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1])
        )

    if case not in ("scaler", "second", "hook", "given", "reopened"):
        return raised(distribute)
    strategy |= {"gradient_merge": {"k_steps": 2}} if case == "reopened" else {}
    _, face = distribute()
    if case == "reopened":
        for step in range(2):
            face.backward(loss_of(model, step, rank))
            loss_of(model, 2, rank).backward() if step else face.step()
        return raised(face.step)
    if case == "given":
        return raised(inner.state_dict)
    if case == "second":
        other = nn.Linear(2, 2)
        return raised(lambda: fleet.distribute(other, optim.SGD(other.parameters(), lr=0.1)))
    if case == "hook":
        face.update.register_step_pre_hook(lambda *_: None)
        return raised(lambda: face.minimize(loss_of(model, 0, rank)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    return raised(lambda: scaler.step(face))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stage", "the model is sharded by fully_shard, which is stage 3"),
        ("part left out", "`extra.weight` is trained, and fully_shard has left it out"),
        ("sample", "steps of a sample"),
        ("scalar", "`scale` has no dimension"),
        ("types", "trainable parameters are of several types"),
        ("Adafactor", "gives the optimizer parts of tensors"),
        ("budget", "strategy.recompute beside strategy.sharding of stage 3"),
        ("noise", "fully_shard averages them inside backward"),
        ("compile", "strategy.compile beside strategy.sharding of stage 3"),
        ("sync_batch_norm", "strategy.sync_batch_norm beside strategy.sharding of stage 3"),
        ("bf16_allreduce", "strategy.bf16_allreduce beside strategy.sharding of stage 3: fully_shard reduces"),
        ("powersgd", "strategy.powersgd beside strategy.sharding of stage 3"),
        ("quantized_allreduce", "strategy.quantized_allreduce beside strategy.sharding of stage 3: fully_shard reduces"),
        ("muon", "strategy.muon beside strategy.sharding of stage 3: it orthogonalises whole matrices"),
        ("localsgd", "localsgd and sharding both claim `shard`"),
        ("dgc", "dgc and sharding both claim `shard`"),
        ("auto", "strategy.auto beside strategy.sharding of stage 3"),
        ("scaler", "a GradScaler by hand beside strategy.sharding"),
        ("second", "trains one pair of model and optimizer in a process"),
        ("hook", "a hook is registered before the optimizer's step"),
        ("given", "would be this rank's share alone"),
        ("reopened", "a backward has added to gradients that this merge window has reduced already"),
    ],
)
def test_what_does_not_go_with_it_is_named_on_all_ranks(case: str, words: str) -> None:
    for said in run_ranks(_refused, 2, case):
        assert words in said


def test_a_framework_that_saves_whole_weights_on_one_rank_refuses_stage_3() -> None:
    with pytest.raises(ConfigError, match="divides the weights, and FleetTrainer saves and loads whole ones"):
        refuse_divided_weights(fleet.DistributedStrategy(**THREE), who="FleetTrainer")
    refuse_divided_weights(fleet.DistributedStrategy(sharding={"stage": 2}), who="FleetTrainer")

"""Accelerate with a strategy: its own loop, on two real ranks, against its own DDP loop and against a plain fleet loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from tests.helpers.accelerate_runs import EXAMPLES, LIMIT, changed_lines, computes_in, fresh, run_example, strategy_of
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import flat_state, mlp

pytest.importorskip("accelerate", reason="Accelerate is not installed")

EPOCHS = 3


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 8, generator=generator), torch.randint(0, 4, (80,), generator=generator)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.7)
    return model, optimizer, DataLoader(TensorDataset(x, y), 8), scheduler  # 5 batches a rank: windows of 2 end with a short one


def plain(**kwargs: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **kwargs)


def ours(**kwargs: Any) -> Any:
    from fleetx.integrations.accelerate import Accelerator

    return Accelerator(**kwargs)


def accelerate_loop(accelerator: Any, *, clips: bool = False) -> dict[str, Any]:
    """As Accelerate's documentation writes it."""
    model, optimizer, loader, scheduler = accelerator.prepare(*objects())
    losses: list[float] = []
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    weights = flat_state(accelerator.unwrap_model(model))
    return {"losses": losses, "weights": weights, "lr": scheduler.get_last_lr()[0], "name": type(model).__name__}


def fleet_loop(**settings: Any) -> dict[str, Any]:
    """The same data and schedule, without Accelerate's loop."""
    model, inner, loader, scheduler = objects()
    loader = plain().prepare(loader)
    model, optimizer = fleet.distribute(model, inner, strategy_of(**settings))
    for _ in range(EPOCHS):
        for x, y in loader:
            if optimizer.minimize(F.cross_entropy(model(x), y)).due:
                scheduler.step()
                scheduler.step()
    return {"weights": flat_state(model), "lr": scheduler.get_last_lr()[0]}


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
SETTINGS: dict[str, dict[str, Any]] = {
    "lars": {"lars": True},
    "merge": MERGE,
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "localsgd_merge": MERGE | {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "dgc": {"dgc": True, "dgc_configs": {"sparsity": [0.5], "min_numel": 1}},
    "bf16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
}


def _cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def add(name: str, run: Callable[[], Any]) -> None:
        with fresh(rank):
            found[name] = run()

    add("ddp", lambda: accelerate_loop(plain(), clips=True))
    add("neutral", lambda: accelerate_loop(ours(strategy=strategy_of()), clips=True))
    for steps in (2, 5):
        add(f"ddp_{steps}", lambda: accelerate_loop(plain(gradient_accumulation_steps=steps), clips=True))  # noqa: B023
        add(f"merge_{steps}", lambda: accelerate_loop(ours(gradient_accumulation_steps=steps), clips=True))  # noqa: B023
    add("merge_3", lambda: accelerate_loop(ours(gradient_accumulation_steps=5)))
    add("fleet_5", lambda: fleet_loop(gradient_merge=True, gradient_merge_configs={"k_steps": 5}))
    add("precision", lambda: accelerate_loop(ours(mixed_precision="bf16", strategy=strategy_of())))
    for name, settings in SETTINGS.items():
        add(f"accelerate {name}", lambda: accelerate_loop(ours(strategy=strategy_of(**settings))))  # noqa: B023
        add(f"fleet {name}", lambda: fleet_loop(**settings))  # noqa: B023
    return found


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return run_ranks(_cases, 2)


def assert_same(cases: list[dict[str, Any]], one: str, other: str) -> None:
    for case in cases:
        torch.testing.assert_close(case[one]["weights"], case[other]["weights"], **LIMIT, msg=lambda text: f"{one}: {text}")
        assert case[one]["lr"] == case[other]["lr"]


@pytest.mark.parametrize(("one", "other"), [("neutral", "ddp"), ("merge_2", "ddp_2"), ("merge_5", "ddp_5")])
def test_a_neutral_strategy_reaches_the_losses_of_accelerates_own_ddp_loop(cases: Any, one: str, other: str) -> None:
    assert len(cases[0][one]["losses"]) == 15
    assert_same(cases, one, other)
    for case in cases:
        torch.testing.assert_close(case[one]["losses"], case[other]["losses"], **LIMIT)
        assert (case[one]["name"], case[other]["name"]) == ("Sequential", "DistributedDataParallel")


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_strategy_through_accelerate_equals_a_plain_fleet_loop(cases: Any, name: str) -> None:
    assert_same(cases, f"accelerate {name}", f"fleet {name}")


def test_accumulation_steps_are_gradient_merge(cases: Any) -> None:
    assert_same(cases, "merge_3", "fleet_5")


def test_mixed_precision_becomes_amp(cases: Any) -> None:
    assert_same(cases, "precision", "fleet bf16")


# --- saving and going on --------------------------------------------------------------------------------------------------


def _resumed(rank: int, folder: str, settings: dict[str, Any], steps: int) -> tuple[Tensor, Tensor, list[str]]:
    """Weights of a run that was not stopped, and of one that goes on from its files."""

    def train(accelerator: Any, pair: Any, batches: range) -> None:
        model, optimizer, _, scheduler = pair
        for index in batches:
            generator = torch.Generator().manual_seed(index * 2 + rank)
            with accelerator.accumulate(model):
                x = torch.randn(8, 8, generator=generator)
                accelerator.backward(F.mse_loss(model(x) + torch.rand(()), x[:, :4]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    with fresh(rank):
        accelerator = ours(strategy=strategy_of(**settings), gradient_accumulation_steps=steps)
        pair = accelerator.prepare(*objects())
        train(accelerator, pair, range(7))
        accelerator.save_state(folder)
        train(accelerator, pair, range(7, 14))
        straight = flat_state(pair[0])
    with fresh(rank):
        torch.manual_seed(99)
        accelerator = ours(strategy=strategy_of(**settings), gradient_accumulation_steps=steps)
        pair = accelerator.prepare(*objects())
        accelerator.load_state(folder)
        train(accelerator, pair, range(7, 14))
        resumed = flat_state(pair[0])
    return straight, resumed, sorted(os.listdir(folder))


@pytest.mark.parametrize(("name", "steps"), [("dgc", 1), ("localsgd", 2), ("merge", 1)])
def test_save_state_and_load_state_go_on_to_the_bit(tmp_path: Path, name: str, steps: int) -> None:
    for straight, resumed, files in run_ranks(_resumed, 2, str(tmp_path), SETTINGS[name], steps):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        assert {"fleetx", "model.safetensors", "optimizer.bin", "scheduler.bin"} <= set(files)


def _saved_weights(rank: int, folder: str) -> tuple[Tensor, Tensor, Tensor, str]:
    from safetensors.torch import load_file

    with fresh(rank):
        accelerator = ours(strategy=strategy_of(**SETTINGS["localsgd"]))
        model, optimizer, loader, _ = accelerator.prepare(*objects())
        x, y = next(iter(loader))
        for _ in range(2):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        refused = raised(lambda: accelerator.save_model(model, folder))
        with optimizer.averaged():
            accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        saved = load_file(Path(folder) / "model.safetensors")
        own = torch.cat([t.flatten() for t in model.state_dict().values()])
        both = accelerator.gather(own.reshape(1, -1))
        return torch.cat([saved[k].flatten() for k in model.state_dict()]), both.mean(0), own, refused


def test_under_local_sgd_the_average_is_saved_and_a_ranks_own_weights_are_not(tmp_path: Path) -> None:
    for saved, mean, own, refused in run_ranks(_saved_weights, 2, str(tmp_path)):
        torch.testing.assert_close(saved, mean, **LIMIT)
        assert not torch.equal(saved, own)
        assert "with optimizer.averaged(): accelerator.save_model" in refused


# --- several pairs, and what is refused ------------------------------------------------------------------------------------


def _pairs(rank: int) -> tuple[str, bool]:
    with fresh(rank):
        accelerator = ours(strategy=strategy_of())
        left, right = nn.Linear(4, 4), nn.Linear(4, 4)
        first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (left, right))
        second, right, left, first = accelerator.prepare(second, right, left, first)  # in any order
        x = torch.randn(3, 4)
        accelerator.backward(left(x).square().mean())
        first.step()
        first.zero_grad()
        told = raised(lambda: accelerator.backward(right(left(x)).mean()))
        second.backward(right(left(x)).square().mean())
        untouched = left.weight.grad is None and right.weight.grad is not None
        second.step()
        return told, untouched


def test_with_several_pairs_a_loss_of_one_finds_it_and_a_loss_of_two_must_say_which() -> None:
    for told, untouched in run_ranks(_pairs, 2):
        assert "reaches the parameters of 2 prepared optimizers" in told and "optimizer.backward(loss)" in told
        assert untouched


def _refusals(rank: int, folder: str) -> dict[str, str]:
    from accelerate import DistributedDataParallelKwargs

    def without_its_model() -> None:
        ours(strategy=strategy_of()).prepare(objects()[1])

    def saved_by_plain_accelerate() -> None:
        accelerator = plain()
        accelerator.prepare(*objects())
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        with fresh(rank):
            accelerator = ours(strategy=strategy_of())
            accelerator.prepare(nn.Module())
            accelerator.prepare(*objects())
            accelerator.load_strategy_state(Path(folder))

    def prepared_for(use: Callable[[Any, nn.Module], Any], **given: Any) -> Callable[[], Any]:
        def call() -> None:
            accelerator = ours(**given)
            model, *_ = accelerator.prepare(*objects())
            use(accelerator, model)

        return call

    def set_later(accelerator: Any, model: nn.Module) -> None:
        accelerator.gradient_accumulation_steps = 4
        accelerator.backward(model(torch.ones(2, 8)).mean())

    def clipped(**settings: Any) -> Callable[[], Any]:
        return prepared_for(lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0), strategy=strategy_of(**settings))

    clip_norm = {"clip_norm": True, "clip_norm_configs": {"max_norm": 5.0}}
    budget = {"recompute": True, "recompute_configs": {"budget": "1GB"}}
    calls: dict[str, Callable[[], Any]] = {
        "accumulation": prepared_for(set_later, gradient_accumulation_steps=2),
        "no_sync": prepared_for(lambda a, m: a.no_sync(m)),
        "clip_norm": clipped(**clip_norm),
        "dgc": clipped(**SETTINGS["dgc"]),
        "clip_value": prepared_for(lambda a, m: a.clip_grad_value_(m.parameters(), 1.0), strategy=strategy_of(**clip_norm)),
        "auto": lambda: ours(strategy=strategy_of(auto=True)),
        "budget": lambda: ours(strategy=strategy_of(**budget)),
        "placement": lambda: ours().prepare(*objects(), device_placement=[True]),
        "autocast": lambda: ours().autocast(autocast_handler=object()),
        "windows": lambda: ours(gradient_accumulation_steps=2, strategy=strategy_of(**MERGE)),
        "precision": lambda: ours(mixed_precision="fp16", strategy=strategy_of(amp=True)),
        "fp8": lambda: ours(mixed_precision="fp8"),
        "handler": lambda: ours(kwargs_handlers=[DistributedDataParallelKwargs()]),
        "strategy": lambda: ours(strategy={"lars": True}),
        "uneven": lambda: ours().join_uneven_inputs([]),
        "conflict": lambda: ours(strategy=strategy_of(lars=True, dgc=True)).prepare(*objects()),
        "alone": without_its_model,
        "files": saved_by_plain_accelerate,
    }
    told = {}
    for name, call in calls.items():
        with fresh(rank):
            told[name] = raised(call)
    return told


def test_what_both_sides_say_or_nothing_would_follow_is_refused_by_name(tmp_path: Path) -> None:
    for told in run_ranks(_refusals, 2, str(tmp_path)):
        assert "was 2 when the Accelerator was made and is 4 now" in told["accumulation"]
        assert "Write Accelerator(gradient_accumulation_steps=...)" in told["no_sync"]
        assert "clip_grad_norm_(..., 1.0) and strategy.clip_norm both clip" in told["clip_norm"]
        assert "clip_grad_norm_(..., 1.0) and strategy.dgc both clip" in told["dgc"]
        assert "clip_grad_value_(..., 1.0) and strategy.clip_norm both clip" in told["clip_value"]
        assert "optimizer.plan.strategy" in told["auto"] and "fleetx plan" in told["auto"]
        assert 'recompute_configs["budget"] is' in told["budget"] and "memory_plan.recomputed" in told["budget"]
        assert told["placement"].startswith("ValueError") and "device_placement" in told["placement"]
        assert "strategy.amp_configs has the precision" in told["autocast"]
        assert "gradient_accumulation_steps=2 and strategy.gradient_merge both say" in told["windows"]
        assert 'mixed_precision="fp16" and strategy.amp both set the precision' in told["precision"]
        assert 'mixed_precision="fp8" is not supported' in told["fp8"]
        assert "DistributedDataParallelKwargs" in told["handler"] and "find_unused_parameters" in told["handler"]
        assert "must be a fleet.DistributedStrategy" in told["strategy"]
        assert "even_batches=True" in told["uneven"]
        assert told["conflict"].startswith("StrategyConflict: dgc and lars both claim")
        assert "accelerator.prepare(model, optimizer, ...)" in told["alone"]
        assert told["files"].startswith("CheckpointError") and "no folder `fleetx`" in told["files"]


def _again(rank: int) -> dict[str, Any]:
    def one_step(accelerator: Any, model: nn.Module, optimizer: Any) -> str:
        accelerator.backward(F.cross_entropy(model(torch.ones(2, 8)), torch.tensor([0, 1])))
        optimizer.step()
        optimizer.zero_grad()
        return computes_in(model)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with fresh(rank):
        told: dict[str, Any] = {}
        accelerator = ours(strategy=strategy_of(lars=True, **SETTINGS["bf16"]))
        model = mlp()
        model, first = accelerator.prepare(model, sgd(model))
        told["trained"] = one_step(accelerator, model, first)
        accelerator.free_memory()
        told["freed"] = computes_in(model), "forward" in vars(model)
        told["step"] = raised(first.step)
        told["prepare"] = raised(lambda: accelerator.prepare(model, first))
        model, second = accelerator.prepare(model, sgd(model))
        told["prepared again"] = one_step(accelerator, model, second)
        newer = accelerator.prepare(sgd(model))
        told["newer"] = one_step(accelerator, model, newer)
        told["older"] = raised(second.step)
        other = ours(strategy=strategy_of())
        model, third = other.prepare(model, sgd(model))
        told["another"] = one_step(other, model, third)
        told["taken"] = [
            raised(lambda: one_step(accelerator, model, second)),
            raised(second.step),
            raised(accelerator.save_state),
        ]
        model, fourth = accelerator.prepare(model, sgd(model))
        told["taken back"] = one_step(accelerator, model, fourth)
        return told


def test_a_model_can_be_prepared_again_and_what_trained_it_before_says_so() -> None:
    for told in run_ranks(_again, 2):
        assert told["trained"] == told["prepared again"] == told["taken back"] == "torch.bfloat16"
        assert told["freed"] == ("torch.float32", False)
        assert "released by accelerator.free_memory()" in told["step"] and "a new torch optimizer" in told["prepare"]
        assert told["newer"] == "torch.bfloat16" and "this pair has ended" in told["older"]
        assert told["another"] == "torch.float32"
        assert all("prepared again, by another Accelerator" in text for text in told["taken"])


def _in_a_window(rank: int) -> dict[str, Any]:
    with fresh(rank):
        accelerator = ours(strategy=strategy_of(**MERGE))
        model, optimizer, loader, scheduler = accelerator.prepare(*objects())
        x, y = next(iter(loader))
        due, norms, moved, skipped = [], [], [], []
        for _ in range(6):
            accelerator.backward(F.cross_entropy(model(x), y))
            due.append(accelerator.sync_gradients)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0) is not None)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            moved.append(scheduler.scheduler.last_epoch)
            skipped.append(accelerator.optimizer_step_was_skipped)
        return {"due": due, "norms": norms, "moved": moved, "skipped": skipped}


def test_with_the_strategys_own_windows_clipping_and_schedule_wait_for_their_end() -> None:
    told = run_ranks(_in_a_window, 2)[0]
    assert told["due"] == told["norms"] == [False, False, True] * 2
    assert told["moved"] == [0, 0, 2, 2, 2, 4]  # by Accelerate's count: as many as there are processes
    assert told["skipped"] == [True, True, False] * 2


# --- as a user meets it ---------------------------------------------------------------------------------------------------


def test_one_process_without_a_launcher_trains_as_plain_accelerate_does(alone: None) -> None:
    from accelerate.state import AcceleratorState, GradientState

    told = []
    for make in (lambda: ours(strategy=strategy_of(**SETTINGS["localsgd"])), plain):
        try:
            told.append(accelerate_loop(make()))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    torch.testing.assert_close(told[0]["losses"], told[1]["losses"], **LIMIT)
    assert len(told[0]["losses"]) == 2 * 15


@pytest.mark.campaign
def test_the_example_learns_to_read_under_fleetrun() -> None:
    assert run_example("accelerate_loop.py", "fleetx.launch", "--nproc_per_node", "2") > 90


def test_the_example_differs_from_plain_accelerate_in_few_lines() -> None:
    after = (EXAMPLES / "accelerate_loop.py").read_text()
    before = after.replace("from fleetx import fleet\n", "").replace("from fleetx.integrations.accelerate", "from accelerate")
    before = "\n".join(line for line in before.splitlines() if not line.strip().startswith("strategy"))
    before = before.replace("Accelerator(strategy=strategy)", "Accelerator()").replace("with optimizer.averaged(), ", "with ")
    assert "fleet." not in before and "strategy" not in before.partition("import")[2]
    assert changed_lines(before, after) <= 10

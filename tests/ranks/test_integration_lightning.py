"""Lightning trains by FleetStrategy as it does by itself, and a fleet strategy does there what it does in a plain loop."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.harness import raised, run_ranks
from tests.helpers.launchers import MARK, find_marked, wait_until
from tests.helpers.lightning_runs import (
    BATCH,
    as_launched,
    fit,
    loss_of,
    make_data,
    make_gan,
    make_loader,
    make_module,
    make_net,
    make_trainer,
    outcome,
    plain_loop,
    weights_of,
)

pytest.importorskip("lightning", reason="Lightning is not installed")

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "neutral": {},
    "lars": {"lars": {}},
    "gradient_merge": {"gradient_merge": {"k_steps": 4}},
    "localsgd": {"localsgd": {"k_steps": 2}},
    "dgc": {"dgc": {"sparsity": [0.5], "min_numel": 1}},
    "sharding": {"sharding": {}},
}
PAIRED = {
    "as it is": {},
    "accumulating": {"accumulate_grad_batches": 4, "max_epochs": 2},
    "clipping": {"gradient_clip_val": 0.05},
    "clipping values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "in bfloat16": {"precision": "bf16-mixed"},
}


DDP_FOR_GANS = "ddp_find_unused_parameters_true"


def by_hand() -> Any:
    return make_module(manual=True)


def strategy_of(parts: dict[str, dict[str, Any]]) -> Any:
    from fleetx import fleet

    strategy = fleet.DistributedStrategy()
    for name, configs in parts.items():
        setattr(strategy, name, True)
        setattr(strategy, f"{name}_configs", configs)
    return strategy


def fleet_strategy(parts: dict[str, dict[str, Any]]) -> Any:
    from fleetx.integrations.lightning import FleetStrategy

    return FleetStrategy(strategy_of(parts))


def farthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


# --- training ---------------------------------------------------------------------------------------------------------


def train_everything(rank: int, folder: str) -> dict[str, Any]:
    with as_launched(rank):
        runs: dict[str, Any] = {}
        for name, settings in PAIRED.items():
            runs[name] = [outcome(*fit(rank, s, folder, **settings)) for s in ("ddp", fleet_strategy({}))]
        for name, parts in STRATEGIES.items():
            through = outcome(*fit(rank, fleet_strategy(parts), folder, max_epochs=2))
            runs[name] = [plain_loop(rank, strategy_of(parts), epochs=2), through]
        merged = {**STRATEGIES["lars"], **STRATEGIES["gradient_merge"]}
        through = outcome(*fit(rank, fleet_strategy(merged), folder, module=by_hand()))
        runs["merging by hand"] = [plain_loop(rank, strategy_of(merged)), through]
        for name, make, theirs in (("by hand", by_hand, "ddp"), ("with two optimizers", make_gan, DDP_FOR_GANS)):
            runs[name] = [outcome(*fit(rank, s, folder, module=make())) for s in (theirs, fleet_strategy({}))]
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_everything, 2, str(tmp_path_factory.mktemp("trained")))


@pytest.mark.parametrize("case", [*PAIRED, "by hand", "with two optimizers"])
def test_a_neutral_strategy_trains_as_lightnings_own_ddp(runs: list[dict[str, Any]], case: str) -> None:
    for of_a_rank in runs:
        theirs, ours = of_a_rank[case]
        assert len(ours["losses"]) >= 14
        assert farthest(ours["losses"], theirs["losses"]) < 1e-6
        assert farthest(ours["weights"], theirs["weights"]) < 1e-6
        assert (ours["global_step"], ours["rates"]) == (theirs["global_step"], theirs["rates"])
        assert ours["is_bare"] and not theirs["is_bare"]


@pytest.mark.parametrize("name", [*STRATEGIES, "merging by hand"])
def test_a_strategy_trains_as_in_a_plain_loop(runs: list[dict[str, Any]], name: str) -> None:
    for of_a_rank in runs:
        plain, through = of_a_rank[name]
        assert farthest(through["losses"], plain["losses"]) < 1e-6
        assert farthest(through["weights"], plain["weights"]) < 1e-6


def test_a_merge_window_is_one_step_of_lightning_and_an_epoch_ends_with_a_short_one(runs: list[dict[str, Any]]) -> None:
    through = runs[0]["gradient_merge"][1]
    assert through["global_step"] == 2 * 4  # of 14 batches: 4, 4, 4 and 2
    assert len(through["losses"]) == 2 * 14
    assert through["rates"][:5] == pytest.approx([0.2] * 4 + [0.2 * 0.7])


def test_all_ranks_leave_local_sgd_with_the_same_weights(runs: list[dict[str, Any]]) -> None:
    first, second = (of_a_rank["localsgd"][1] for of_a_rank in runs)
    assert first["weights"] == second["weights"]
    assert first["losses"] != second["losses"]


# --- layers that thaw in mid-training ----------------------------------------------------------------------------------


def make_finetuned() -> Any:
    """A head that trains alone for an epoch, then with its backbone, as Lightning's BaseFinetuning has it."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BaseFinetuning

    class Thaw(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.2, momentum=0.9)

        def configure_callbacks(self) -> list[Any]:
            return [Thaw()]

    return Module()


def finetune(rank: int, folder: str) -> list[float]:
    module, _ = fit(rank, fleet_strategy({}), folder, module=make_finetuned(), max_epochs=3)
    return weights_of(module)


def finetune_by_hand() -> list[float]:
    """The mean of both ranks' losses, in one process. Lightning's own DDP does not reduce layers that thaw later."""
    net = make_net()
    head, backbone = list(net[2].parameters()), list(net[0].parameters())  # type: ignore[index]
    optimizer = torch.optim.SGD(head, lr=0.2, momentum=0.9)
    for p in backbone:
        p.requires_grad_(False)
    for epoch in range(3):
        if epoch == 1:
            for p in backbone:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": backbone, "lr": 0.05})
        samplers = [DistributedSampler(make_data(), 2, rank) for rank in range(2)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*(DataLoader(make_data(), BATCH, sampler=sampler) for sampler in samplers), strict=True):
            optimizer.zero_grad()
            (sum(loss_of(net, batch) for batch in batches) / 2).backward()
            optimizer.step()
    return weights_of(net)


def test_layers_that_thaw_in_mid_training_get_the_mean_of_the_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(finetune, 2, str(tmp_path))
    assert first == second
    assert farthest(first, finetune_by_hand()) < 1e-6


# --- checkpoints ------------------------------------------------------------------------------------------------------

PERIOD = {"localsgd": {"localsgd": {"k_steps": 5}}}
"""An epoch of 14 updates ends between two averagings."""


def train_in_two_halves(rank: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    results = {}
    for name, parts in (STRATEGIES | PERIOD).items():
        place = f"{folder}/{name}"
        whole = outcome(*fit(rank, fleet_strategy(parts), place, max_epochs=2))
        saving = {"callbacks": [ModelCheckpoint(dirpath=place, filename="first")], "enable_checkpointing": True}
        fit(rank, fleet_strategy(parts), place, **saving)
        second = outcome(*fit(rank, fleet_strategy(parts), place, max_epochs=2, ckpt_path=f"{place}/first.ckpt"))
        results[name] = (whole, second, sorted(os.listdir(place)))
    return results


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_in_two_halves, 2, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_goes_on_from_ckpt_path_to_the_bit(halves: list[dict[str, Any]], name: str) -> None:
    for of_a_rank in halves:
        whole, second, _ = of_a_rank[name]
        assert second["losses"] == whole["losses"][14:]
        assert second["weights"] == whole["weights"]
        assert second["global_step"] == whole["global_step"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_what_differs_from_rank_to_rank_lies_beside_the_checkpoint(halves: list[dict[str, Any]], name: str) -> None:
    beside = ["first.ckpt.fleetx"] if name in ("localsgd", "dgc", "sharding") else []
    assert halves[0][name][2] == ["first.ckpt", *beside]


def validate_while_apart(rank: int, folder: str) -> dict[str, Any]:
    """Two checkpoints of one run: kept at the end of validation, and asked for in the middle of an epoch."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    own: list[list[float]] = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                own.append(weights_of(module))
                trainer.save_checkpoint(f"{folder}/middle.ckpt")
                own.append(weights_of(module))

    kept = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=1, monitor="val", mode="max")
    settings = {"callbacks": [kept, Saves()], "enable_checkpointing": True, "limit_val_batches": 2, "max_epochs": 3}
    module, trainer = fit(rank, fleet_strategy(PERIOD["localsgd"]), folder, **settings)
    best = torch.load(kept.best_model_path)["state_dict"]
    middle = torch.load(f"{folder}/middle.ckpt")["state_dict"]
    return {
        "own": own,
        "middle": torch.cat([value.flatten() for value in middle.values()]).tolist(),
        "shown": module.shown,
        "last_saved": kept.best_model_path,
        "saved": torch.cat([value.flatten() for value in best.values()]).tolist(),
        "files": sorted(os.listdir(folder)),
        "tested": trainer.global_step,
    }


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(validate_while_apart, 2, str(tmp_path_factory.mktemp("validated")))


def test_under_local_sgd_a_checkpoint_holds_the_average_and_each_rank_trains_on_with_its_own(
    validated: list[dict[str, Any]],
) -> None:
    (before, after), (others, _) = validated[0]["own"], validated[1]["own"]
    assert before == after != others
    mean = [(a + b) / 2 for a, b in zip(before, others, strict=True)]
    assert farthest(validated[0]["middle"], mean) < 1e-6


def test_under_local_sgd_the_average_is_validated(validated: list[dict[str, Any]]) -> None:
    assert validated[0]["shown"] == validated[1]["shown"]


def test_what_lies_beside_a_checkpoint_goes_with_it(validated: list[dict[str, Any]]) -> None:
    names = [name for name in validated[0]["files"] if name.startswith("step=")]
    assert names == [Path(validated[0]["last_saved"]).name, f"{Path(validated[0]['last_saved']).name}.fleetx"]


def resume_from_odd_places(rank: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fleetx.errors import FleetWarning

    told: dict[str, Any] = {}
    for name, strategy in (("apart", fleet_strategy(PERIOD["localsgd"])), ("plain", "ddp")):
        fit(rank, strategy, folder, callbacks=[ModelCheckpoint(dirpath=folder, filename=name)], enable_checkpointing=True)
    if rank == 0:
        Path(folder, "apart.ckpt.fleetx").rename(Path(folder, "elsewhere"))
    torch.distributed.barrier()
    told["lost"] = raised(lambda: fit(rank, fleet_strategy(PERIOD["localsgd"]), folder, ckpt_path=f"{folder}/apart.ckpt"))
    with as_launched(rank), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer, module = make_trainer(fleet_strategy({}), folder, max_epochs=2), make_module()
        trainer.fit(module, make_loader(), ckpt_path=f"{folder}/plain.ckpt")
    told["heard"] = [str(w.message) for w in heard if issubclass(w.category, FleetWarning)]
    told["plain"] = outcome(module, trainer)
    told["whole"] = outcome(*fit(rank, "ddp", folder, max_epochs=2))
    return told


def test_a_checkpoint_without_its_folder_or_of_plain_lightning_is_told_of(tmp_path: Path) -> None:
    first, second = run_ranks(resume_from_odd_places, 2, str(tmp_path))
    for told in (first, second):
        assert told["lost"].startswith("CheckpointError") and "apart.ckpt.fleetx, which is not there" in told["lost"]
        assert farthest(told["plain"]["losses"], told["whole"]["losses"][14:]) < 1e-6
    assert ["saved without FleetStrategy" in text for text in first["heard"]] == [True]
    assert second["heard"] == []


def fail_in_the_middle(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 alone fails and saves, under Local SGD and without; the other is in no collective with it."""
    import lightning.pytorch as pl

    from fleetx.errors import FleetWarning

    def save(parts: dict[str, dict[str, Any]], name: str) -> list[str]:
        class Saves(pl.Callback):
            def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
                if rank == 0:
                    trainer.strategy.barrier = lambda *_: None  # Lightning itself would wait for the other after writing
                    trainer.save_checkpoint(f"{folder}/{name}.ckpt")

        class Fails(type(make_module())):  # type: ignore[misc]
            def on_train_batch_end(self, *_: Any) -> None:
                if self.trainer.global_step == 4:
                    raise RuntimeError("here")

        with warnings.catch_warnings(record=True) as heard, as_launched(rank):
            warnings.simplefilter("always")
            trainer = make_trainer(fleet_strategy(parts), folder, callbacks=[Saves()])
            told = raised(lambda: trainer.fit(Fails(False), make_loader()))
        return [told, *(str(w.message) for w in heard if issubclass(w.category, FleetWarning))]

    told: dict[str, Any] = {"apart": save(PERIOD["localsgd"], "apart"), "together": save({}, "together")}
    if rank == 0:
        told["kept"] = [sorted(torch.load(f"{folder}/{name}.ckpt").get("fleetx", {})) for name in ("apart", "together")]
    return told


def test_one_rank_that_fails_alone_saves_what_it_can_without_the_others(tmp_path: Path) -> None:
    first, second = run_ranks(fail_in_the_middle, 2, str(tmp_path))
    assert first["kept"] == [[], ["states"]]
    assert [text.split(" is saved after")[-1][:10] for text in first["apart"]] == ["RuntimeErr", " an error:"]
    assert (first["together"], second["apart"]) == (["RuntimeError: here"], ["RuntimeError: here"])


# --- what is refused --------------------------------------------------------------------------------------------------


def ask_for_too_much(rank: int, folder: str) -> dict[str, str]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
    from lightning.pytorch.plugins import MixedPrecision

    from fleetx.integrations.lightning import FleetStrategy

    class OwnBackward(type(make_module())):  # type: ignore[misc]
        def backward(self, loss: Any) -> None:
            loss.backward()

    class Shared(type(make_module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()]

    class Twice(type(make_module())):  # type: ignore[misc]
        def training_step(self, batch: Any, _: int) -> None:
            for _ in range(2):
                self.manual_backward(self.net(batch[0]).mean())

    class Minimizes(type(make_module())):  # type: ignore[misc]
        def training_step(self, batch: Any, _: int) -> None:
            self.optimizers().minimize(self.net(batch[0]).mean())

    class LeavesOut(type(make_module())):  # type: ignore[misc]
        def training_step(self, batch: Any, number: int) -> Any:
            return None if number == 2 else super().training_step(batch, number)

    class WithBatchNorm(type(make_module())):  # type: ignore[misc]
        def __init__(self, manual: bool) -> None:
            super().__init__(manual)
            self.norm = torch.nn.BatchNorm1d(1)

    def refused(parts: dict[str, dict[str, Any]], module: Any = None, **settings: Any) -> str:
        return raised(lambda: fit(rank, fleet_strategy(parts), folder, module=module, **settings))

    assert issubclass(FleetStrategy, pl.strategies.DDPStrategy)
    return {
        "scaler": refused({}, plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))),
        "amp": refused({"amp": {}}, precision="bf16-mixed"),
        "clips": refused({"clip_norm": {}, "gradient_merge": {"k_steps": 2}}, gradient_clip_val=1.0, accumulate_grad_batches=2),
        "schedule": refused({}, callbacks=[GradientAccumulationScheduler({0: 2})]),
        "backward": refused({}, OwnBackward(False)),
        "batch norm": refused({}, sync_batchnorm=True),
        "shared": refused({}, Shared(True)),
        "twice": refused({}, Twice(True)),
        "minimize": refused({}, Minimizes(True)),
        "no loss": refused({}, LeavesOut(False)),
        "no loss in a window": refused({"gradient_merge": {"k_steps": 2}}, LeavesOut(False)),
        "weight averaging": refused({"localsgd": {}}, callbacks=[StochasticWeightAveraging(0.1)]),
        "weight averaging by auto": refused({"auto": {}}, callbacks=[StochasticWeightAveraging(0.1)]),
        "weight averaging of statistics": refused({}, WithBatchNorm(False), callbacks=[StochasticWeightAveraging(0.1)]),
        "both reached": refused({}, make_gan(toggles=False)),
        "option": raised(lambda: FleetStrategy(find_unused_parameters=True)),
        "no strategy": raised(lambda: FleetStrategy({"lars": True})),
        "auto": refused({"auto": {}}, accumulate_grad_batches=2),
        "other world": refused({}, devices=3),
        "in conflict": refused({"lars": {}, "dgc": {}}),
    }


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(ask_for_too_much, 2, str(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize(
    ("case", "kind", "parts"),
    [
        ("scaler", "StrategyConflict", ["precision='16-mixed'", "strategy.amp = True", '"float16"']),
        ("amp", "StrategyConflict", ["precision='bf16-mixed'", "strategy.amp"]),
        (
            "clips",
            "StrategyConflict",
            ["gradient_clip_val=1.0", "strategy.clip_norm", "accumulate_grad_batches=2"],
        ),
        ("schedule", "StrategyConflict", ["GradientAccumulationScheduler", "Trainer(accumulate_grad_batches=...)"]),
        ("backward", "ConfigError", ["OwnBackward.backward is overridden", "self.manual_backward(loss)"]),
        ("batch norm", "ConfigError", ["sync_batchnorm=True", "strategy.sync_batch_norm = True"]),
        ("shared", "ConfigError", ["optimizer 0 of 4", "net", "a module of their own"]),
        ("twice", "ConfigError", ["twice before opt.step()", "strategy.gradient_merge = True"]),
        ("minimize", "ConfigError", ["self.manual_backward(loss)"]),
        ("no loss", "ConfigError", ["LeavesOut.training_step returned None", "return 0 * loss"]),
        ("no loss in a window", "ConfigError", ["LeavesOut.training_step returned None", "return 0 * loss"]),
        ("weight averaging", "StrategyConflict", ["StochasticWeightAveraging", "strategy.localsgd"]),
        ("weight averaging by auto", "StrategyConflict", ["strategy.auto may choose Local SGD"]),
        ("weight averaging of statistics", "StrategyConflict", ["StochasticWeightAveraging", "BatchNorm"]),
        ("both reached", "ConfigError", ["optimizers [0, 1] of 2", "self.toggle_optimizer(opt)", "opt.backward(loss)"]),
        ("option", "ConfigError", ["FleetStrategy has no find_unused_parameters"]),
        ("no strategy", "ConfigError", ["given dict", "fleet.DistributedStrategy"]),
        ("auto", "StrategyConflict", ["accumulate_grad_batches=2", "strategy.auto"]),
        ("other world", "ConfigError", ["a job of 2 rank(s)", "one of 3", "Leave fleet.init() out", "--nproc_per_node 3"]),
        ("in conflict", "StrategyConflict", ["lars", "dgc"]),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank_with_the_line_to_write(
    refusals: list[dict[str, str]], case: str, kind: str, parts: list[str]
) -> None:
    for of_a_rank in refusals:
        assert of_a_rank[case].startswith(f"{kind}: ")
        assert [part for part in parts if part not in of_a_rank[case]] == []


# --- more of Lightning ------------------------------------------------------------------------------------------------


def use_it_on(rank: int, folder: str) -> dict[str, Any]:
    """Fit twice, with other Trainers, validate and test the same module; under amp, and with a report."""
    module = make_module()
    fit(rank, fleet_strategy({"amp": {"dtype": "bfloat16"}}), folder, module=module)
    fit(rank, fleet_strategy({"gradient_merge": {"k_steps": 2}}), folder, module=module)
    strategy = fleet_strategy({"gradient_merge": {"k_steps": 2}})
    with as_launched(rank):
        trainer = make_trainer(strategy, folder, limit_val_batches=2)
        for _ in range(2):
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(module, make_loader())
        first = trainer.validate(module, make_loader(), verbose=False)[0]["val"]
    return {
        "count": len(module.losses),
        "val": first,
        "report": (strategy.report.due, strategy.report.bytes_sent > 0),
        "accumulates": trainer.accumulate_grad_batches,
        "keys": sorted(module.state_dict()),
    }


def test_a_module_is_fitted_again_by_another_trainer_and_validated(tmp_path: Path) -> None:
    first, second = run_ranks(use_it_on, 2, str(tmp_path))
    assert first["count"] == 4 * 14
    assert first["val"] == second["val"] < 0.5
    assert first["report"] == (True, True)
    assert first["accumulates"] == 1
    assert first["keys"] == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]


def fit_and_let_go(rank: int, folder: str) -> dict[str, Any]:
    """What is left of a strategy in its module, in its optimizers and in memory when training is over."""
    from fleetx.engine.modules.patching import patch_of

    told: dict[str, Any] = {"kinds": []}
    module = make_module()
    module.net[0].register_forward_hook(lambda *seen: told["kinds"].append(str(seen[2].dtype)))
    changed = {"amp": {"dtype": "bfloat16"}, "recompute": {"checkpoints": ["net.0"]}}
    for strategy in (fleet_strategy(changed), "ddp"):
        fit(rank, strategy, folder, module=module, limit_train_batches=2)
    told["patched"] = [name for name, part in module.named_modules() if patch_of(part) is not None]
    told["saved"] = {name: save_after_training(rank, STRATEGIES[name], f"{folder}/{name}.ckpt") for name in ("lars", "dgc")}
    told["alive"] = [fit_and_forget(rank, parts, folder) for parts in (*STRATEGIES.values(), changed)]
    return told


def save_after_training(rank: int, parts: dict[str, dict[str, Any]], path: str) -> Any:
    """The losses of a second epoch that begins with what was saved when the first fit was over; and as of one fit."""
    module, trainer = fit(rank, fleet_strategy(parts), path)
    with as_launched(rank):
        trainer.validate(module, make_loader(), verbose=False)
        trainer.save_checkpoint(path)
    second, _ = fit(rank, fleet_strategy(parts), path, max_epochs=2, ckpt_path=path)
    return second.losses, fit(rank, fleet_strategy(parts), path, max_epochs=2)[0].losses[14:]


def fit_and_forget(rank: int, parts: dict[str, dict[str, Any]], folder: str) -> bool:
    module = weakref.ref(fit(rank, fleet_strategy(parts), folder, limit_train_batches=2)[0])
    gc.collect()
    return module() is not None


@pytest.fixture(scope="module")
def let_go(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fit_and_let_go, 2, str(tmp_path_factory.mktemp("let_go")))


def test_nothing_of_a_strategy_acts_in_a_later_fit_without_it(let_go: list[dict[str, Any]]) -> None:
    kinds = let_go[0]["kinds"]
    assert kinds[0] == "torch.bfloat16"
    assert kinds[-2:] == ["torch.float32"] * 2
    assert let_go[0]["patched"] == []


def test_a_module_is_freed_when_nothing_holds_it(let_go: list[dict[str, Any]]) -> None:
    assert let_go[0]["alive"] == [False] * (len(STRATEGIES) + 1)


@pytest.mark.parametrize("name", ["lars", "dgc"])
def test_a_checkpoint_saved_after_training_holds_the_optimizers_too(let_go: list[dict[str, Any]], name: str) -> None:
    for of_a_rank in let_go:
        second, whole = of_a_rank["saved"][name]
        assert len(second) == 14
        assert second == whole


def change_rates_from_outside(rank: int, folder: str) -> dict[str, Any]:
    """Schedulers that are made when Lightning's optimizers are there: a callback's own, and StochasticWeightAveraging's."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Halves(pl.Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            self.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, gamma=0.5)

        def on_train_batch_end(self, *_: Any) -> None:
            self.scheduler.step()

    def made() -> Any:
        module = make_module()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
        return module

    def both(callback: Any, **settings: Any) -> list[Any]:
        runs = [fit(rank, s, folder, module=made(), callbacks=[callback()], **settings) for s in ("ddp", fleet_strategy({}))]
        return [outcome(*run) for run in runs]

    def swa() -> Any:
        return StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)

    return {"callback": both(Halves, limit_train_batches=4), "swa": both(swa, max_epochs=3)}


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(change_rates_from_outside, 2, str(tmp_path_factory.mktemp("rates")))


@pytest.mark.parametrize("case", ["callback", "swa"])
def test_a_scheduler_made_of_the_trainers_optimizers_acts_as_with_lightnings_own_ddp(
    rates: list[dict[str, Any]], case: str
) -> None:
    for of_a_rank in rates:
        theirs, ours = of_a_rank[case]
        assert len(set(ours["rates"])) > 1
        assert ours["rates"] == theirs["rates"]
        assert farthest(ours["weights"], theirs["weights"]) < 1e-6


# --- who starts the processes -----------------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples" / "lightning_module.py"


def run_python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    launched_by = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEETX_TTY")
    env = {name: value for name, value in os.environ.items() if name not in launched_by}
    env |= {MARK: str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


@pytest.mark.campaign
def test_the_example_comes_to_the_same_started_by_lightning_and_by_fleetrun(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    fleetrun = ("-m", "fleetx.launch", "--nproc_per_node", "2")
    lines = []
    for launcher in ((), fleetrun):
        ended = run_python(*launcher, str(EXAMPLE), "--epochs", "4", folder=tmp_path)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        lines.append(re.findall(r"accuracy ([\d.]+)% after 88 updates", ended.stdout))
    assert lines[0] == lines[1]
    assert float(lines[0][0]) > 85
    wait_until(lambda: find_marked(str(tmp_path)) == [], 20)


def test_at_most_ten_lines_of_the_example_are_of_fleetx() -> None:
    marked = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.endswith("# fleetx")]
    assert 0 < len(marked) <= 10


OTHER_PACKAGE = """
import sys
import pytorch_lightning as pl
import torch
from fleetx import fleet
from fleetx.integrations.lightning import FleetStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = FleetStrategy(fleet.DistributedStrategy(lars=True))
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), 2))
print("updates", trainer.global_step, strategy.report.trust_ratios is not None, "lightning.pytorch" in sys.modules)
"""


@pytest.mark.campaign
def test_the_older_package_of_lightning_is_served_too(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    ended = run_python("-c", OTHER_PACKAGE, folder=tmp_path)
    assert "updates 8 True False" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]

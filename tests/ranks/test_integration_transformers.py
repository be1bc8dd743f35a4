"""Hugging Face's Trainer with a strategy, on two real ranks, against its own DDP loop and against a plain fleet loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.accelerate_runs import EXAMPLES, LIMIT, changed_lines, computes_in, fresh, run_example, strategy_of
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import flat_state

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

UPDATES_PER_EPOCH = 5  # of micro-batches: windows of 2 end with a short one
EPOCHS = 3


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = UPDATES_PER_EPOCH * 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 8, generator=generator)
        self.y = torch.randint(0, 4, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """Returns its loss first, as Trainer wants it, by the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        out: Tensor = self.body(x)
        return (out,) if labels is None else (F.cross_entropy(out, labels), out)


def arguments(folder: str, **given: Any) -> Any:
    from transformers import TrainingArguments

    usual: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": EPOCHS,
        "learning_rate": 0.1, "lr_scheduler_type": "linear", "optim": "sgd", "optim_args": "momentum=0.9", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0, "seed": 7,
    }  # fmt: skip
    return TrainingArguments(folder, **(usual | given))


def trainer(folder: str, model: nn.Module | None = None, settings: dict[str, Any] | None = None, **given: Any) -> Any:
    """FleetTrainer with these settings, or the plain one where they are None."""
    import transformers

    transformers.logging.set_verbosity_error()
    kwargs = {"model": Net() if model is None else model, "train_dataset": Rows(), "eval_dataset": Rows(16)}
    made = arguments(folder, **given)
    if settings is None:
        return transformers.Trainer(args=made, **kwargs)
    from fleetx.integrations.transformers import FleetTrainer

    return FleetTrainer(args=made, fleet_strategy=strategy_of(**settings), **kwargs)


def trained(folder: str, settings: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    run = trainer(folder, None, settings, **given)
    run.train()
    history = run.state.log_history
    return {
        "weights": flat_state(run.model),
        "losses": [line["loss"] for line in history if "loss" in line],
        "lr": [line["learning_rate"] for line in history if "learning_rate" in line],
        "norms": [line["grad_norm"] for line in history if "grad_norm" in line],
        "steps": run.state.global_step,
        "name": type(run.model_wrapped).__name__,
        "eval": run.evaluate()["eval_loss"],
    }


def watched(folder: str) -> dict[str, Any]:
    """Its last step is between two rounds, and evaluates."""
    from transformers import TrainerCallback

    seen: list[Tensor] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
            if state.global_step == 13:
                seen.append(flat_state(model))

    settings = {"localsgd": True, "localsgd_configs": {"k_steps": 8}}
    run = trainer(folder, None, settings, max_steps=13, eval_strategy="steps", eval_steps=13)
    run.add_callback(Watch())
    run.train()
    during = [line["eval_loss"] for line in run.state.log_history if "eval_loss" in line]
    return {"weights": flat_state(run.model), "during": seen, "during_eval": during, "eval": run.evaluate()["eval_loss"]}


def best(folder: str) -> dict[str, Any]:
    """The outer step of another round would move the weights that were loaded."""
    diloco = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}}
    given = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 10}
    run = trainer(f"{folder}/best", None, diloco, load_best_model_at_end=True, learning_rate=2.0, **given)
    run.train()
    return {"best": run.state.best_metric, "eval": run.evaluate()["eval_loss"], "weights": flat_state(run.model)}


def stopped(folder: str) -> dict[str, Any]:
    """Inside a window, by a callback; and trained again after it."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step == 3

    run = trainer(folder, None, LOCAL, gradient_accumulation_steps=2, max_steps=5)
    stop = Stop()
    run.add_callback(stop)
    run.train()
    steps, weights = run.state.global_step, flat_state(run.model)
    run.remove_callback(stop)
    run.train()
    return {"steps": steps, "weights": weights, "later": run.state.global_step}


def again(folder: str) -> dict[str, Any]:
    """Another FleetTrainer on the model; the first one then; and what is left in it after release()."""
    amp = {"lars": True, "amp": True, "amp_configs": {"dtype": "bfloat16"}}
    first = trainer(folder, None, amp, max_steps=2)
    first.train()
    first.train()  # the same pair
    second = trainer(folder, first.model, amp, max_steps=2)
    second.train()
    refused = raised(first.train)
    state = sorted(second.optimizer.state_dict())
    trained_in = computes_in(second.model)
    second.accelerator.release()
    patched = [name for name, module in second.model.named_modules() if "forward" in vars(module)]
    return {"refused": refused, "patched": patched, "state": state, "dtypes": [trained_in, computes_in(second.model)]}


def fleet_loop(folder: str, window: int = 1, **settings: Any) -> dict[str, Any]:
    """The same batches and schedule, without Trainer's loop."""
    from transformers import get_scheduler, set_seed

    batches = trainer(folder).get_train_dataloader()
    set_seed(7)
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updates = EPOCHS * -(-UPDATES_PER_EPOCH // window)
    scheduler = get_scheduler("linear", inner, num_warmup_steps=0, num_training_steps=updates)
    model, optimizer = fleet.distribute(model, inner, strategy_of(**settings))
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for batch in batches:
            if optimizer.minimize(model(**batch)[0]).due:
                scheduler.step()
        if optimizer.flush().due:
            scheduler.step()
    with optimizer.averaged():
        return {"weights": flat_state(model)}


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
SETTINGS: dict[str, dict[str, Any]] = {"lars": {"lars": True}, "merge": MERGE, "localsgd": LOCAL, "localsgd_merge": LOCAL | MERGE}


def _cases(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def add(name: str, run: Callable[[], Any]) -> None:
        with fresh(rank):
            found[name] = run()

    for name, given in {"plain": {}, "windows": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}}.items():
        add(f"ddp {name}", lambda: trained(folder, None, **given))  # noqa: B023
        add(f"neutral {name}", lambda: trained(folder, {}, **given))  # noqa: B023
    add("mid-period", lambda: watched(folder))
    add("best", lambda: best(folder))
    add("stopped", lambda: stopped(folder))
    add("again", lambda: again(folder))
    add("both say 2", lambda: trained(folder, MERGE, gradient_accumulation_steps=2))
    for name, settings in SETTINGS.items():
        window = 2 if "merge" in name else 1
        add(f"trainer {name}", lambda: trained(folder, settings))  # noqa: B023
        add(f"fleet {name}", lambda: fleet_loop(folder, window, **settings))  # noqa: B023
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(_cases, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", ["plain", "windows"])
def test_a_neutral_strategy_reaches_the_losses_of_trainers_own_ddp_loop(cases: Any, name: str) -> None:
    for case in cases:
        ours, theirs = case[f"neutral {name}"], case[f"ddp {name}"]
        assert (ours["name"], theirs["name"]) == ("Net", "DistributedDataParallel")
        assert ours["steps"] == theirs["steps"] == (15 if name == "plain" else 9)
        for what in ("weights", "losses", "lr", "norms", "eval"):
            torch.testing.assert_close(ours[what], theirs[what], **LIMIT, msg=lambda text: f"{what}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_strategy_through_trainer_equals_a_plain_fleet_loop(cases: Any, name: str) -> None:
    for case in cases:  # under Local SGD both end with the average
        torch.testing.assert_close(case[f"trainer {name}"]["weights"], case[f"fleet {name}"]["weights"], **LIMIT)


def test_windows_of_the_strategy_count_as_trainers_own(cases: Any) -> None:
    for case in cases:
        by_strategy, by_both = case["trainer merge"], case["both say 2"]
        assert by_strategy["steps"] == by_both["steps"] == 9
        torch.testing.assert_close(by_strategy["weights"], by_both["weights"], rtol=0, atol=0)


def test_under_local_sgd_all_ranks_evaluate_and_end_with_the_same_average(cases: Any) -> None:
    first, second = (case["mid-period"] for case in cases)
    assert torch.equal(first["weights"], second["weights"])
    assert first["eval"] == second["eval"]
    assert not torch.equal(first["during"][0], second["during"][0])  # between two rounds each has its own
    assert first["during_eval"] == second["during_eval"] and len(first["during_eval"]) == 1


def test_the_best_model_stays_as_it_was_loaded(cases: Any) -> None:
    for case in cases:
        assert case["best"]["best"] == case["best"]["eval"]
    assert torch.equal(cases[0]["best"]["weights"], cases[1]["best"]["weights"])


def test_a_training_stopped_inside_a_window_ends_with_the_average_and_can_go_on(cases: Any) -> None:
    assert [(case["stopped"]["steps"], case["stopped"]["later"]) for case in cases] == [(3, 5)] * 2
    assert torch.equal(cases[0]["stopped"]["weights"], cases[1]["stopped"]["weights"])


def test_another_trainer_takes_the_model_and_release_leaves_nothing_of_the_strategy_in_it(cases: Any) -> None:
    for case in cases:
        told = case["again"]
        assert "prepared again, by another Accelerator or FleetTrainer" in told["refused"]
        assert told["patched"] == [] and told["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert told["state"] == ["param_groups", "state"]


# --- files ----------------------------------------------------------------------------------------------------------------


def _resumed(rank: int, folder: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    given = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "gradient_accumulation_steps": steps}
    with fresh(rank):
        run = trainer(folder, None, settings, **given)
        run.train()
        straight = flat_state(run.model)
    with fresh(rank):
        run = trainer(folder, None, settings, **given)
        run.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
        resumed = flat_state(run.model)
        run.save_model(str(Path(folder) / "final"))
        all_ranks = run.accelerator.gather(resumed.reshape(1, -1))
        saved = load_file(Path(folder) / "final" / "model.safetensors")
        kept = torch.cat([saved[name].double().flatten() for name in run.model.state_dict()])
    return {"straight": straight, "resumed": resumed, "mean": all_ranks.mean(0), "saved": kept, "files": os.listdir(folder)}


@pytest.mark.parametrize(
    ("settings", "steps"), [(LOCAL, 1), ({"lars": True, "sharding": True}, 2)], ids=["localsgd", "lars, sharded"]
)
def test_a_checkpoint_goes_on_to_the_bit_and_save_model_writes_the_average(
    tmp_path: Path, settings: dict[str, Any], steps: int
) -> None:
    for told in run_ranks(_resumed, 2, str(tmp_path), settings, steps):
        torch.testing.assert_close(told["resumed"], told["straight"], rtol=0, atol=0)
        torch.testing.assert_close(told["saved"], told["mean"], **LIMIT)
        assert {"checkpoint-4", "final"} <= set(told["files"])


# --- what is refused ------------------------------------------------------------------------------------------------------


def _refusals(rank: int, folder: str) -> dict[str, str]:
    def saved_by_plain_trainer() -> None:
        given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        trainer(folder, **given).train()
        with fresh(rank):
            trainer(folder, None, {}, **given | {"max_steps": 4}).train(resume_from_checkpoint=f"{folder}/checkpoint-2")

    class Asks:
        fp16 = auto_find_batch_size = True

    def arguments_of_both_kinds() -> None:
        from fleetx.integrations.transformers import refuse_arguments

        refuse_arguments(Asks())

    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: trainer(folder, None, {}, bf16=True),
        "clip_norm": lambda: trainer(folder, None, {"clip_norm": True}, max_grad_norm=1.0),
        "dgc": lambda: trainer(folder, None, {"dgc": True}, max_grad_norm=1.0),
        "auto": lambda: trainer(folder, None, {"auto": True}),
        "budget": lambda: trainer(folder, None, {"recompute": True, "recompute_configs": {"budget": "1GB"}}),
        "several": arguments_of_both_kinds,
        "windows": lambda: trainer(folder, None, MERGE, gradient_accumulation_steps=3),
        "sums": lambda: trainer(folder, None, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": False}}),
        "adam": lambda: trainer(folder, None, {"lars": True}, optim="adamw_torch", optim_args=None).train(),
        "files": saved_by_plain_trainer,
    }
    told = {}
    for name, call in calls.items():
        with fresh(rank):
            told[name] = raised(call)
    return told


def test_arguments_that_nothing_would_follow_are_refused_by_name(tmp_path: Path) -> None:
    for told in run_ranks(_refusals, 2, str(tmp_path)):
        assert "bf16: write strategy.amp = True" in told["bf16"]
        assert "and strategy.clip_norm both clip the gradients. Write TrainingArguments(max_grad_norm=0)" in told["clip_norm"]
        assert "strategy.dgc" in told["dgc"] and "Write TrainingArguments(max_grad_norm=0)" in told["dgc"]
        assert "then give FleetTrainer what was chosen: optimizer.plan.strategy" in told["auto"]
        assert 'recompute_configs["budget"] is' in told["budget"]
        assert "fp16: write strategy.amp" in told["several"] and "auto_find_batch_size: " in told["several"]
        assert "gradient_accumulation_steps=3 and strategy.gradient_merge with k_steps=2 differ" in told["windows"]
        assert 'gradient_merge_configs["avg"] is False' in told["sums"]
        assert "strategy.lars takes the place of torch.optim.SGD" in told["adam"]
        assert told["files"].startswith("CheckpointError") and "no folder `fleetx`" in told["files"]


# --- as a user meets it ---------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_the_example_learns_to_read_under_torchrun() -> None:
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d")
    assert run_example("hf_trainer.py", *launcher, "--rdzv_endpoint", "localhost:0") > 90


def test_the_example_differs_from_plain_trainer_in_few_lines() -> None:
    after = (EXAMPLES / "hf_trainer.py").read_text()
    before = after.replace("from fleetx import fleet\n", "").replace("FleetTrainer", "Trainer")
    before = before.replace("from fleetx.integrations.transformers import", "from transformers import")
    before = "\n".join(line for line in before.splitlines() if not line.strip().startswith("strategy"))
    before = before.replace(", fleet_strategy=strategy", "")
    assert "fleet" not in before.partition("import")[2]
    assert changed_lines(before, after) <= 10

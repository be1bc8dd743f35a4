"""fleet.find_batch on one process: what it finds fits, by torch's profiler, more does not, and it leaves no trace."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import ConfigError, FleetWarning
from fleetx.recompute.find_batch import FoundBatches
from tests.helpers.budget_nets import allocated_in, lasting_bytes
from tests.helpers.recompute_nets import NETS, WIDTH, Chain, Inner, Norm
from tests.helpers.recompute_runs import random_now, rows, seed

LARGE = ["convolutions", "u-net", "torch transformer"]
MB = 1_000_000
SMALL = 50_000
"""A budget for `SmallNet`: 145 rows of it, 73 without recompute."""
RANDOM_STATE = 5056
"""Bytes of torch's generator that each unit computed again keeps: no operation makes them, so they are not counted."""
AMP = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}


class SmallNet(nn.Module):
    """Norms that count batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Norm(), Norm(), Norm()]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None:
    """Every test here."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def strategy_of(**settings: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(**settings)


def find(model: nn.Module, optimizer: Any = None, strategy: Any = None, **given: Any) -> FoundBatches:
    budget = SMALL if isinstance(model, SmallNet) else MB
    settings: dict[str, Any] = {"sample": rows(0, 32), "loss_fn": cross_entropy, "budget": budget} | given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        return fleet.find_batch(model, sgd(model) if optimizer is None else optimizer, strategy, **settings)


def distribute(model: nn.Module, optimizer: Any, strategy: Any, **given: Any) -> Any:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        return fleet.distribute(model, optimizer, strategy, **({"loss_fn": cross_entropy} | given))


def own_peak(model: nn.Module, optimizer: Any, batch: Any, loss_fn: Any = cross_entropy) -> int:
    """Of a whole step, the update included: what lasts from before it, and what the profiler sees on top."""
    optimizer.minimize(loss_fn(model, batch))
    before = lasting_bytes(model, optimizer, batch)
    return before + allocated_in(lambda: optimizer.minimize(loss_fn(model, batch))).peak


# --- what it finds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LARGE)
def test_the_most_fits_by_the_profiler_and_three_percent_more_does_not(name: str) -> None:
    build = NETS[name].build
    seed()
    found = find(build(), sample=rows(0, 64))
    assert found.largest.size == found.most > found.stored > 0 and found.largest.recomputed
    seed()
    model = build()
    model, optimizer = distribute(model, sgd(model), found.largest.strategy, sample=found.largest.sample)
    real = own_peak(model, optimizer, found.largest.sample)
    print(f"FIGURE {name} most {found.most} stored {found.stored} told {found.largest.peak_bytes} own {real} budget {MB}")
    unseen = RANDOM_STATE * len(optimizer.memory_plan.recomputed)
    assert 0.95 * MB <= real - unseen <= MB
    assert abs(found.largest.peak_bytes - (real - unseen)) <= 0.01 * MB
    larger = found.most + max(2, round(0.03 * found.most))
    model = build()
    with pytest.raises(ConfigError, match="no plan keeps to it"):
        distribute(model, sgd(model), found.largest.strategy, sample=rows(0, larger))
    assert next(batch for batch in found.tried if batch.size == found.stored).recomputed == ()
    for size, fits in ((found.stored, True), (found.stored + max(2, round(0.03 * found.stored)), False)):
        model = build()
        model, optimizer = distribute(model, sgd(model), None)
        assert (own_peak(model, optimizer, rows(0, size)) <= MB) == fits, size


def test_every_batch_tried_keeps_to_the_budget_and_the_fastest_is_the_best_of_them() -> None:
    seed()
    found = find(NETS["u-net"].build())
    assert [batch.size for batch in found.tried] == sorted({batch.size for batch in found.tried})
    assert all(batch.peak_bytes <= found.budget == MB for batch in found.tried)
    assert found.fastest.samples_per_second == max(batch.samples_per_second for batch in found.tried) > 0
    assert found.fastest in found.tried and found.largest is found.tried[-1]
    for batch in found.tried:
        assert batch.strategy.recompute == bool(batch.recomputed) and len(batch.sample[0]) == batch.size
        assert batch.merge_steps == 1 and not batch.strategy.gradient_merge
        model = NETS["u-net"].build()
        model, optimizer = distribute(model, sgd(model), batch.strategy, sample=batch.sample)
        plan = optimizer.memory_plan  # its own: which of two plans is faster may have turned since
        real = own_peak(model, optimizer, batch.sample) - RANDOM_STATE * len(plan.recomputed if plan else ())
        assert real <= MB and (plan is not None or abs(real - batch.peak_bytes) <= 0.01 * real)


def test_the_table_is_printed_and_marks_both(capsys: pytest.CaptureFixture[str]) -> None:
    seed()
    found = find(SmallNet())
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    assert sum("largest" in line for line in printed.splitlines()) == 1 and "budget 48.83 KiB" in printed
    assert sum("fastest" in line for line in printed.splitlines()) == 1


@pytest.mark.parametrize("wanted", [1, 16, 149, 720])
def test_merge_steps_and_sizes_make_up_the_global_batch(wanted: int) -> None:
    seed()
    found = find(Chain(nn.Sequential(Inner(), Inner(), Inner())), global_batch=wanted, budget=SMALL)
    assert 100 < found.most < 149
    for batch in found.tried:
        assert batch.merge_steps * batch.size == wanted and batch.size <= found.most
        assert batch.strategy.gradient_merge == (batch.merge_steps > 1)
        assert batch.merge_steps == 1 or batch.strategy.gradient_merge_configs["k_steps"] == batch.merge_steps
    assert found.largest.size == max(size for size in range(1, found.most + 1) if wanted % size == 0)


def test_the_strategys_own_way_to_merge_is_kept() -> None:
    seed()
    given = strategy_of(gradient_merge=True, gradient_merge_configs={"k_steps": 3, "avg": False})
    found = find(SmallNet(), strategy=given, global_batch=400)
    assert found.largest.merge_steps > 1
    assert found.largest.strategy.gradient_merge_configs == {"k_steps": found.largest.merge_steps, "avg": False}
    assert given.gradient_merge_configs["k_steps"] == 3


def test_merge_steps_that_were_asked_for_stay_where_no_global_batch_is_named() -> None:
    seed()
    given = strategy_of(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    found = find(SmallNet(), strategy=given)
    assert found.largest.strategy.gradient_merge and found.largest.strategy.gradient_merge_configs["k_steps"] == 3


def test_a_strategy_that_distribute_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="xyzzy"):
        find(SmallNet(), strategy=strategy_of(recompute=True, recompute_configs={"checkpoints": ["xyzzy"]}))


class Reduced(nn.Module):
    """Wide rows of which a few numbers are used: the update needs more than forward and backward, and each row counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, :8].mean(0, keepdim=True))


def test_where_the_update_needs_the_most_the_batch_still_fits() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1][:1])

    model = Reduced()
    sample = torch.randn(8, 4096), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    found = find(model, optimizer, sample=sample, loss_fn=loss_fn, budget=2 * MB)
    model, optimizer = distribute(model, optimizer, found.largest.strategy)
    assert own_peak(model, optimizer, found.largest.sample, loss_fn) <= 2 * MB


def test_a_small_sample_finds_about_what_a_large_one_does() -> None:
    seed()
    found = [find(SmallNet(), sample=rows(0, count)).most for count in (16, 128)]
    assert abs(found[0] - found[1]) <= max(2, 0.03 * found[1])


def test_checkpoints_of_the_strategy_are_the_only_units() -> None:
    seed()
    given = strategy_of(recompute=True, recompute_configs={"checkpoints": ["blocks.1"]})
    found = find(SmallNet(), strategy=given)
    assert found.largest.recomputed == ("blocks.1",)
    assert found.largest.strategy.recompute_configs["checkpoints"] == ["blocks.1"]
    gc.collect()
    assert found.most < find(SmallNet()).most


# --- as if it had not been ----------------------------------------------------------------------------------------------------


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": [id(buffer) for buffer in model.buffers()],
        "parameters": [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "same groups": [id(group) for group in optimizer.param_groups],
        "random": random_now(),
    }


def assert_unchanged(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in before:
        if key in ("state", "gradients", "optimizer"):
            torch.testing.assert_close(now[key], before[key], rtol=0, atol=0)
        else:
            assert now[key] == before[key], key


OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "two groups": lambda model: torch.optim.Adam(
        [{"params": list(model.parameters())[:3], "lr": 0.1}, {"params": list(model.parameters())[3:]}]
    ),
}
AWKWARD = {
    "convolutions": NETS["convolutions"].build,
    "u-net": NETS["u-net"].build,
    "replaced buffer": NETS["replaced buffer"].build,
    "python and numpy": NETS["python and numpy"].build,
    "spectral norm": NETS["spectral norm"].build,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["convolutions"])
def test_model_optimizer_and_random_numbers_are_as_before(name: str, optimizer: str) -> None:
    seed()
    model = NETS[name].build()
    inner = OPTIMIZERS[optimizer](model)
    before = everything(model, inner)
    find(model, inner)
    assert_unchanged(everything(model, inner), before)
    assert not inner.state and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", AWKWARD)
def test_so_they_are_in_the_middle_of_training(name: str) -> None:
    seed()
    model = AWKWARD[name]()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(2):
        inner.zero_grad()
        cross_entropy(model, rows(index)).backward()
        inner.step()
    inner.zero_grad()
    next(module for module in model.modules() if not list(module.children())).eval()  # modes of its own
    before = everything(model, inner)
    find(model, inner)
    assert_unchanged(everything(model, inner), before)


def test_gradients_that_are_there_already_are_refused_in_words_and_stay() -> None:
    seed()
    model = SmallNet()
    inner = sgd(model)
    cross_entropy(model, rows(0)).backward()
    before = everything(model, inner)
    with pytest.raises(ConfigError, match=r"has gradients already.*model\.zero_grad\(\)"):
        find(model, inner)
    assert_unchanged(everything(model, inner), before)


def test_after_an_error_everything_is_as_before_too() -> None:
    calls = [0]

    def breaks(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        loss = cross_entropy(model, batch)
        if calls[0] == 20:
            raise KeyError("a word that is not in the vocabulary")
        return loss

    seed()
    model = SmallNet()
    inner = sgd(model)
    before = everything(model, inner)
    with pytest.raises(KeyError, match="not in the vocabulary"):
        find(model, inner, loss_fn=breaks)
    assert calls[0] == 20
    assert_unchanged(everything(model, inner), before)


def test_plain_torch_goes_on_with_model_and_optimizer_as_if_nothing_had_been() -> None:
    found = []
    for finds in (True, False):
        seed()
        model = SmallNet()
        inner = sgd(model)
        if finds:
            find(model, inner)
        for index in range(4):
            inner.zero_grad()
            cross_entropy(model, rows(index)).backward()
            inner.step()
        found.append(everything(model, inner))
    for key in ("buffers", "parameters", "forwards", "same groups"):
        del found[0][key], found[1][key]
    assert_unchanged(*found)


def test_no_hooks_are_left() -> None:
    model = SmallNet()
    find(model)
    gc.collect()
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks and not module._backward_hooks
    assert not any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it compiles
def test_a_model_can_be_compiled_between_find_batch_and_distribute() -> None:
    seed()
    model = SmallNet()
    inner = sgd(model)
    find(model, inner)
    model, optimizer = distribute(torch.compile(model, backend="eager"), inner, None)
    optimizer.minimize(cross_entropy(model, rows(0)))


def test_the_autocast_of_a_pair_that_trains_is_still_its_own() -> None:
    def is_on() -> bool:
        with fleet.autocast():
            return torch.is_autocast_enabled("cpu")

    model = SmallNet()
    model, _kept = distribute(model, sgd(model), strategy_of(**AMP))
    assert is_on()
    find(SmallNet(), strategy=strategy_of(**AMP))
    gc.collect()
    assert is_on()


class OwnGenerator(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.draws))


def test_a_generator_that_the_model_holds_is_as_before() -> None:
    model = OwnGenerator()
    before = model.draws.get_state()
    find(model)
    assert torch.equal(model.draws.get_state(), before)


# --- and then training ----------------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": AMP,
    "float16": {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 256.0}},
    "clipped": {"clip_norm": True},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "adaptive localsgd": {"adaptive_localsgd": True},
    "merged": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "recompute": {"recompute": True},
    "joined norms": {"sync_batch_norm": True},
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "dgc": {"dgc": True, "dgc_configs": {"rampup_begin_step": 1, "sparsity": [0.9], "min_numel": 16}},
}


def _updates(model: nn.Module, optimizer: Any, *, count: int, rows_each: int) -> list[float]:
    losses = []
    for index in range(count):
        loss = cross_entropy(model, rows(index, rows_each))
        losses.append(loss.item())
        optimizer.minimize(loss)
    return losses


@pytest.mark.parametrize("case", STRATEGIES)
def test_four_updates_after_find_batch_are_those_without_it(case: str) -> None:
    """With the strategy that it gives, and with the same optimizer, which it was given."""
    optimizer_of = (lambda m: torch.optim.Adam(m.parameters(), lr=0.01)) if case == "lamb" else sgd
    chosen: Any = None
    found = []
    for finds in (True, False):
        seed()
        model = SmallNet()
        inner = optimizer_of(model)
        if finds:
            batches = find(model, inner, strategy_of(**STRATEGIES[case]), global_batch=240)
            chosen = batches.largest
            assert chosen.merge_steps * chosen.size == 240
        model, optimizer = distribute(model, inner, chosen.strategy, sample=chosen.sample)
        losses = _updates(model, optimizer, count=4 * chosen.merge_steps, rows_each=chosen.size)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((losses, state, random_now(), copy.deepcopy(optimizer.state_dict())))
        del optimizer
    assert found[0][0] == found[1][0] and found[0][0][0] != found[0][0][-1]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    assert found[0][2] == found[1][2]
    torch.testing.assert_close(found[0][3], found[1][3], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_model_and_optimizer_train_the_same_after_two_searches(optimizer: str) -> None:
    found = []
    for searches in (2, 0):
        seed()
        model = SmallNet()
        inner = OPTIMIZERS[optimizer](model)
        for _ in range(searches):
            gc.collect()
            find(model, inner)
        model, face = distribute(model, inner, None)
        found.append((_updates(model, face, count=4, rows_each=32), random_now()))
        del face
    assert found[0] == found[1]


def test_distribute_right_after_find_batch_needs_no_garbage_collection() -> None:
    seed()
    model = SmallNet()
    inner = sgd(model)
    gc.collect()
    gc.disable()
    try:
        find(model, inner)
        fleet.distribute(model, inner, fleet.DistributedStrategy())
    finally:
        gc.enable()
        gc.collect()


def test_a_strategy_that_takes_the_optimizers_place_leaves_its_groups_as_they_were() -> None:
    model = SmallNet()
    inner = sgd(model)
    before = everything(model, inner)
    find(model, inner, strategy_of(lars=True))
    assert_unchanged(everything(model, inner), before)


# --- other samples --------------------------------------------------------------------------------------------------------------


class Ragged(nn.Module):
    """Rows of numbers laid end to end, with their offsets: only a resize of the user's can make another batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(1, WIDTH), nn.ModuleList([Inner(), Norm(), Inner()]), nn.Linear(WIDTH, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.first(batch["values"].unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        kept = torch.zeros(len(batch["offsets"]) - 1, 1)
        lengths = batch["offsets"].diff()
        index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return kept.index_add(0, index, self.last(x)).square().mean()


def ragged(size: int) -> dict[str, Tensor]:
    return {"values": torch.linspace(-1, 1, 6 * size), "offsets": torch.arange(0, 6 * size + 1, 6)}


def test_a_resize_of_the_users_makes_every_batch_and_the_models_own_loss_is_used() -> None:
    asked: list[int] = []

    def resize(sample: Any, size: int) -> Any:
        assert len(sample["offsets"]) == 17
        asked.append(size)
        return ragged(size)

    seed()
    model = Ragged()
    found = find(model, sample=ragged(16), resize=resize, size=16, loss_fn=None, budget=300_000)
    assert {16, 8, found.most} <= set(asked) and {batch.size for batch in found.tried} <= set(asked)
    assert len(found.largest.sample["offsets"]) == found.most + 1
    model = Ragged()
    with pytest.raises(ConfigError, match="no plan keeps to it"):
        distribute(model, sgd(model), found.largest.strategy, sample=ragged(found.most + max(2, found.most // 33)), loss_fn=None)


def test_rows_are_repeated_in_order_in_samples_of_any_form() -> None:
    class Dictionary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Chain(Inner())

        def loss(self, batch: Any) -> Tensor:
            assert batch["note"] == "text"
            return F.cross_entropy(self.inner(batch["x"]), batch["more"][0])

    x, y = rows(0, 6)
    sample = {"x": x, "more": [y], "note": "text"}
    found = find(Dictionary(), sample=sample, loss_fn=None, budget=100_000)
    made = found.largest.sample
    assert found.most > 12 and made["note"] == "text"
    assert torch.equal(made["x"], x.repeat(found.most // 6 + 1, 1)[: found.most])
    assert torch.equal(made["more"][0], y.repeat(found.most // 6 + 1)[: found.most])
    assert torch.equal(sample["x"], rows(0, 6)[0])


# --- refusals -------------------------------------------------------------------------------------------------------------------


def test_a_budget_too_small_is_refused_with_what_one_row_needs_and_about_that_is_enough() -> None:
    build = NETS["torch transformer"].build
    seed()
    with pytest.raises(ConfigError, match=r"budget is 10000 bytes \(9\.77 KiB\); a batch of 1 needs ([\d.]+) KiB") as refused:
        find(build(), budget=10_000)
    needs = 1024 * float(str(refused.value).split("a batch of 1 needs ")[1].split()[0])
    gc.collect()
    assert 1 <= find(build(), budget=int(needs * 1.05)).most <= 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sample": rows(0, 1), "model": NETS["convolutions"].build}, "at least 2 rows"),
        ({"sample": (torch.zeros(4, WIDTH), torch.zeros(5).long())}, r"its tensors have 4, 5 rows.*resize="),
        ({"sample": (torch.zeros(4, WIDTH), torch.tensor(1.0))}, r"its tensors have 0, 4 rows"),
        ({"sample": rows(0, 0)}, r"its tensors have 0 rows"),
        ({"sample": "text"}, r"there is no tensor in it"),
        ({"sample": None}, r"there is no tensor in it"),
        *[({"budget": value}, "budget is .*a number of bytes") for value in (True, float("nan"), -1, 0, 1.5, "much", None)],
        *[({"global_batch": value}, "global_batch is .*an integer of") for value in (True, float("nan"), -4, 0, 2.0, "8")],
        *[({"size": value}, "size is .*an integer of at least 2") for value in (True, float("nan"), -4, 1, 2.0, "8")],
        ({"strategy": "lars"}, "strategy is str"),
        ({"loss_fn": None}, r"SmallNet has no method `loss\(batch\)`"),
        ({"loss_fn": lambda model, batch: model(batch[0])}, r"loss_fn\(model, sample\) gave a tensor of shape"),
        ({"strategy": {"recompute": True, "recompute_configs": {"checkpoints": ["blox.*"]}}}, "names `blox"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40],
)  # fmt: skip
def test_what_it_cannot_take_is_refused_in_words_and_nothing_is_touched(given: dict[str, Any], told: str) -> None:
    seed()
    model = given.get("model", SmallNet)()
    inner = sgd(model)
    before = everything(model, inner)
    given = {key: value for key, value in given.items() if key != "model"}
    if isinstance(given.get("strategy"), dict):
        given = {**given, "strategy": strategy_of(**given["strategy"])}
    with pytest.raises(ConfigError, match=told):
        find(model, inner, **given)
    assert_unchanged(everything(model, inner), before)


@pytest.mark.parametrize("given", [{"resize": 3}, {"loss_fn": "mean"}], ids=str)
def test_what_is_no_function_is_refused_in_words(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        find(SmallNet(), **given)


def test_a_model_or_an_optimizer_that_is_none_is_refused() -> None:
    model = SmallNet()
    with pytest.raises(ConfigError, match="as the model"):
        find("model", sgd(model))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="as the optimizer"):
        find(model, "sgd")
    _, optimizer = distribute(model, sgd(model), None)
    with pytest.raises(ConfigError, match="already distributed"):
        find(model, optimizer)


# --- memory that runs out -------------------------------------------------------------------------------------------------------


def out_of_memory_above(limit: int) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError(f"no memory for {len(batch[0])} rows")
        return loss

    return loss_fn


@pytest.mark.parametrize("limit", [140, 120, 50, 20])
def test_a_device_that_runs_out_before_the_budget_bounds_the_batch(limit: int) -> None:
    """145 rows fit into the budget; the sample of 32 may itself be too large."""
    seed()
    model = SmallNet()
    inner = sgd(model)
    before = everything(model, inner)
    found = find(model, inner, loss_fn=out_of_memory_above(limit))
    assert limit - max(2, limit // 32) <= found.most <= limit
    assert all(batch.size <= limit for batch in found.tried)
    assert_unchanged(everything(model, inner), before)


def test_a_device_too_small_for_two_rows_is_told() -> None:
    model = SmallNet()
    inner = sgd(model)
    before = everything(model, inner)
    with pytest.raises(ConfigError, match="not even a batch of 2 fits"):
        find(model, inner, loss_fn=out_of_memory_above(1))
    assert_unchanged(everything(model, inner), before)

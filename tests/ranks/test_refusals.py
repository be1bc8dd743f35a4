"""What cannot work is refused, by name and with the line to write, on every rank, and never by waiting for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, mlp


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, index: int) -> Tensor:
    x, y = batch(index)
    return F.cross_entropy(model(x), y)


def pair(**settings: Any) -> tuple[nn.Sequential, FleetOptimizer]:
    model = mlp()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))


def merged(k_steps: int, **more: Any) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **more}}


def assert_refused(ranks: list[str], *fragments: str, error: str = "ConfigError") -> None:
    """The same kind of error on every rank, with the thing's name and the fix in it."""
    for message in ranks:
        assert message.startswith(f"{error}: "), message
        for fragment in fragments:
            assert fragment in message, message


# --- calls ----------------------------------------------------------------------------------------------------------


def _method(rank: int) -> str:
    model, optimizer = pair()
    model.loss = lambda rows: loss_of(model, rank)  # type: ignore[assignment]
    return raised(lambda: optimizer.minimize(model.loss))  # type: ignore[arg-type]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def loss(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.body(rows[0]), rows[1])


def _bound_method(rank: int) -> str:
    model = WithLoss()
    model, optimizer = fleet.distribute(model, sgd(model))
    return raised(lambda: optimizer.minimize(model.loss))  # type: ignore[arg-type]


def test_a_method_in_place_of_the_loss_is_refused() -> None:
    assert_refused(run_ranks(_bound_method, 2), "method", "optimizer.minimize(model.loss(batch))")
    assert_refused(run_ranks(_method, 2), "function", "optimizer.minimize(model.loss(batch))")


def _many_numbers(rank: int) -> str:
    model, optimizer = pair()
    x, y = batch(rank)
    return raised(lambda: optimizer.minimize(F.cross_entropy(model(x), y, reduction="none")))


def test_a_loss_of_many_numbers_is_refused_with_its_shape() -> None:
    assert_refused(run_ranks(_many_numbers, 2), "the loss has shape (8,)", "one number")


def _no_gradient(rank: int) -> str:
    model, optimizer = pair()
    return raised(lambda: optimizer.minimize(loss_of(model, rank).detach()))


def test_a_loss_without_gradient_is_refused() -> None:
    assert_refused(run_ranks(_no_gradient, 2), "the loss does not require a gradient", "trainable parameters")


def _twice(rank: int) -> str:
    model, optimizer = pair()
    optimizer.backward(loss_of(model, rank))
    loss = loss_of(model, 10 + rank)
    return raised(lambda: optimizer.backward(loss))


def test_a_second_optimizer_backward_in_a_reduced_window_is_refused() -> None:
    assert_refused(run_ranks(_twice, 2), "already reduced", "optimizer.step()", error="FleetError")


def _step_of_nothing(rank: int) -> str:
    _, optimizer = pair()
    return raised(optimizer.step)


def test_a_step_without_gradients_is_refused() -> None:
    assert_refused(run_ranks(_step_of_nothing, 2), "no new gradients", "optimizer.backward(loss)", error="FleetError")


def _bare_under_fp16(rank: int) -> str:
    warnings.filterwarnings("ignore", message="amp:")
    model, _optimizer = pair(amp=True, amp_configs={"dtype": "float16"})
    return raised(loss_of(model, rank).backward)


def test_a_bare_backward_under_fp16_is_refused() -> None:
    assert_refused(run_ranks(_bare_under_fp16, 2), "needs to see the loss", "optimizer.backward(loss)", "GradScaler")


# --- weights --------------------------------------------------------------------------------------------------------

Call = Callable[[FleetOptimizer, Tensor], Any]
CALLS: dict[str, Call] = {
    "weighted": lambda optimizer, loss: optimizer.minimize(loss, weight=3.0),
    "plain": lambda optimizer, loss: optimizer.minimize(loss),
    "bare": lambda optimizer, loss: (loss.backward(), optimizer.step(), optimizer.zero_grad()),
}


def _mixed_weights(rank: int, first: str, second: str, period: int) -> str:
    model, optimizer = pair(**merged(period))
    CALLS[first](optimizer, loss_of(model, rank))
    return raised(lambda: CALLS[second](optimizer, loss_of(model, 10 + rank)))


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"), [("weighted", "plain"), ("plain", "weighted"), ("weighted", "bare"), ("bare", "weighted")]
)
def test_a_weight_on_some_calls_only_is_refused(first: str, second: str, period: int) -> None:
    assert_refused(run_ranks(_mixed_weights, 2, first, second, period), "weight")


def _weight_on_one_rank(rank: int, period: int) -> str:
    model, optimizer = pair(**merged(period))

    def train() -> None:
        for step in range(2):
            optimizer.minimize(loss_of(model, 2 * step + rank), weight=2.0 if rank == 1 else None)

    return raised(train)


@pytest.mark.parametrize("period", [1, 2])
def test_a_weight_on_one_rank_only_is_refused_on_every_rank(period: int) -> None:
    assert_refused(run_ranks(_weight_on_one_rank, 2, period), "ranks [1]", "weight=", "every rank must, or none")


def _bad_weights(rank: int) -> list[str]:
    model, optimizer = pair()
    return [raised(lambda w=w: optimizer.minimize(loss_of(model, rank), weight=w)) for w in (-1.0, float("nan"), float("inf"))]  # type: ignore[misc]


def test_a_weight_that_is_no_amount_is_refused_with_its_value() -> None:
    for messages in run_ranks(_bad_weights, 2):
        for message, shown in zip(messages, ["-1.0", "nan", "inf"], strict=True):
            assert_refused([message], f"weight is {shown}", "at least 0")


def _weight_of_a_sum(rank: int) -> str:
    model, optimizer = pair(**merged(2, avg=False))
    return raised(lambda: optimizer.minimize(loss_of(model, rank), weight=2.0))


def test_a_weight_in_a_summed_window_is_refused() -> None:
    assert_refused(run_ranks(_weight_of_a_sum, 2), "weight=", 'gradient_merge_configs["avg"] = False', "Keep one of them")


# --- parameters -----------------------------------------------------------------------------------------------------


def _added_in_a_window(rank: int) -> str:
    model = mlp()
    strategy = fleet.DistributedStrategy(**merged(2))
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), strategy)
    optimizer.minimize(loss_of(model, rank))
    return raised(lambda: optimizer.add_param_group({"params": list(model[4].parameters())}))


def test_a_parameter_group_added_inside_a_merge_window_is_refused() -> None:
    assert_refused(run_ranks(_added_in_a_window, 2), "inside a merge window", "between two updates")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def _missing(rank: int, at_step: int, spelling: str) -> str:
    model = Branches()
    model, optimizer = fleet.distribute(model, sgd(model))

    def train() -> None:
        for step in range(at_step + 1):
            x, y = batch(2 * step + rank)
            loss = F.cross_entropy(model(x, both=not (rank == 1 and step == at_step)), y)
            if spelling == "bare":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            elif spelling == "zeroed to zeros":
                optimizer.zero_grad(set_to_none=False)
                optimizer.backward(loss)
                optimizer.step()
            else:
                optimizer.minimize(loss)

    return raised(train)


@pytest.mark.parametrize("spelling", ["minimize", "bare", "zeroed to zeros"])
@pytest.mark.parametrize("at_step", [0, 2])
def test_a_gradient_missing_on_one_rank_is_an_error_on_every_rank(at_step: int, spelling: str) -> None:
    ranks = run_ranks(_missing, 2, at_step, spelling)
    assert_refused(ranks, "rank 1: `b.", "`b.weight`", "`b.bias`", "find_unused_parameters = True", "requires_grad_(False)")
    assert not any("`a." in message or "rank 0:" in message for message in ranks)


# --- models and optimizers ------------------------------------------------------------------------------------------


def _wrapped(rank: int, how: str) -> str:
    model = mlp()
    if how == "DistributedDataParallel":  # around a part of it; around all of it: test_wrapped_models.py
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model), nn.Linear(4, 4))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_module

        distribute_module(model, init_device_mesh("cpu", (2,)))
    return raised(lambda: fleet.distribute(model, sgd(model)))


@pytest.mark.parametrize("how", ["DistributedDataParallel", "DTensor"])
def test_a_model_that_is_distributed_already_is_refused_by_the_name_of_its_wrapper(how: str) -> None:
    assert_refused(run_ranks(_wrapped, 2, how), f"already distributed ({how})", "bare module")


def _sparse(rank: int) -> str:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    return raised(lambda: fleet.distribute(model, sgd(model)))


def test_a_sparse_embedding_is_refused_by_name() -> None:
    assert_refused(run_ranks(_sparse, 2), "`0`", "sparse gradients", "sparse=False")


def _lbfgs(rank: int, spelling: str) -> str:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    if spelling == "distribute":
        return raised(lambda: fleet.distribute(model, optimizer))
    return raised(lambda: fleet.distributed_optimizer(optimizer))


@pytest.mark.parametrize("spelling", ["distribute", "distributed_optimizer"])
def test_lbfgs_is_refused(spelling: str) -> None:
    assert_refused(run_ranks(_lbfgs, 2, spelling), "LBFGS", "closure", "Use SGD or Adam")


# --- ranks that differ ----------------------------------------------------------------------------------------------


def _other_strategy(rank: int) -> str:
    return raised(lambda: pair(**merged(2 if rank == 1 else 4)))


def test_ranks_with_different_strategies_are_refused_on_every_rank() -> None:
    assert_refused(run_ranks(_other_strategy, 3), "ranks [1]", "strategy", "Every rank must build the same one")


def _other_model(rank: int, what: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    if rank == 1 and what == "shape":
        model[2] = nn.Linear(8, 5)
    if rank == 1 and what == "frozen":
        model[2].bias.requires_grad_(False)
    if rank == 1 and what == "buffer":
        model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    if rank == 1 and what == "class":
        model[2].__class__ = type("NormedLinear", (nn.Linear,), {})
    optimizer = sgd(model)
    if rank == 1 and what == "optimizer":
        optimizer.__class__ = type("Tuned", (torch.optim.SGD,), {})
    if what == "tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1 + rank)
    return raised(lambda: fleet.distribute(model, optimizer))


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("shape", "2.weight (5, 8)"),
        ("frozen", "2.bias (4,)"),
        ("buffer", "1.running_mean (8,)"),
        ("class", "module 2 NormedLinear"),
        ("optimizer", "optimizer Tuned"),
        ("tensor", "lr=1.1"),
    ],
)
def test_ranks_with_different_models_are_refused_on_every_rank_with_the_difference(what: str, shown: str) -> None:
    assert_refused(run_ranks(_other_model, 2, what), "rank 1 has another model than rank 0", shown)


def _same_batch(rank: int, way: str) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if way == "forward":
            model, optimizer = pair()
            for _ in range(3):
                optimizer.minimize(loss_of(model, 0))
        else:
            other = WithLoss()
            other, optimizer = fleet.distribute(other, sgd(other))
            for _ in range(3):
                optimizer.minimize(other.loss(batch(0)))
    return [(w.category.__name__, str(w.message)) for w in seen]


@pytest.mark.parametrize("way", ["forward", "method"])
def test_the_same_batch_on_all_ranks_is_warned_of_once_and_on_rank_0_only(way: str) -> None:
    first, *others = run_ranks(_same_batch, 3, way)
    assert [category for category, _ in first] == [FleetWarning.__name__]
    assert "all 3 ranks saw the same first batch" in first[0][1]
    assert "sampler=fleet.sampler(data)" in first[0][1]
    assert others == [[], []]


# --- strategies -----------------------------------------------------------------------------------------------------


def _recovers(rank: int) -> str:
    model = mlp()
    refused = raised(lambda: fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**merged(2 + rank))))
    assert refused.startswith("ConfigError"), refused
    model, optimizer = fleet.distribute(model, sgd(model))
    return raised(lambda: optimizer.minimize(loss_of(model, rank)))


def test_a_model_that_was_refused_can_be_distributed_afterwards() -> None:
    assert run_ranks(_recovers, 2) == ["nothing raised"] * 2

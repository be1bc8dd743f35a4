"""Budgets for what cannot be measured: a batch too large for a step with every unit computed again, a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError
from tests.helpers.budget_runs import bounds, cross_entropy, distribute
from tests.helpers.recompute_runs import rows

ROWS = 256


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8)) for _ in range(12)]
    return nn.Sequential(*blocks, nn.Linear(8, 4))


def batch(count: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 8), torch.randint(0, 4, (count,))


def short_of_memory(calls: list[int], measured: int) -> Any:
    """A card on which steps of more than `measured` rows fit by the final plan alone: nothing larger than a half was run yet."""

    def loss_fn(model: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
        size = len(sample[0])
        if size > measured and not any(count <= measured for count in calls):
            raise torch.OutOfMemoryError(f"made up: no room for {size} rows")
        calls.append(size)
        return cross_entropy(model, sample)

    return loss_fn


@pytest.mark.parametrize("measured", [ROWS // 2, ROWS // 4])
def test_a_step_that_cannot_be_measured_is_predicted_from_smaller_batches(measured: int) -> None:
    least, plain = bounds(chain, batch())
    calls: list[int] = []
    budget = (2 * least + plain) // 3
    _, optimizer = distribute(chain(), budget, batch(), loss_fn=short_of_memory(calls, measured))
    plan = optimizer.memory_plan
    assert {measured, measured // 2} <= set(calls) and calls[-1] == ROWS, "measured at two smaller sizes, proven at the whole one"
    assert plan.recomputed and plan.real_bytes <= budget
    assert abs(plan.predicted_bytes / plan.real_bytes - 1) < 0.03


def test_and_of_a_sample_without_rows_the_refusal_names_the_budget() -> None:
    def loss_fn(model: nn.Module, sample: Any) -> Tensor:
        raise torch.OutOfMemoryError("made up: no room")

    with pytest.raises(ConfigError, match=r'\["budget"\] is 1000000 bytes .* does not fit .* \(made up: no room\)'):
        distribute(chain(), "1MB", (*batch(), torch.tensor(0.5)), loss_fn=loss_fn)


def test_a_compiled_model_is_refused_with_what_to_compile_instead() -> None:
    whole = torch.compile(chain(), backend="eager")
    with pytest.raises(ConfigError, match=r"strategy\.compile = True"):
        distribute(whole, "1MB", rows(0, 32))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler tells that it leaves our code uncompiled
def test_compiled_blocks_have_a_plan() -> None:
    model = chain()
    for block in model[:-1]:
        block.compile(backend="eager")
    least, plain = bounds(chain, batch())
    model, optimizer = distribute(model, (least + plain) // 2, batch())
    assert optimizer.memory_plan.recomputed
    other, theirs = distribute(chain(), None, None)
    for _ in range(3):
        losses = []
        for one, trained in ((model, optimizer), (other, theirs)):
            torch.manual_seed(2)
            losses.append(trained.minimize(cross_entropy(one, batch())).loss)
        assert losses[0] == losses[1]

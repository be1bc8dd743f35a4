"""Guards parameters that are added, replaced, frozen or unfrozen in mid-training, and models changed in other ways."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.ddp_loops import STEPS, loss_of, make_pair, rows, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


def _joining(rank: int, how: str, spelling: str) -> Tensor:
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    joins = list(model[2].parameters())
    held = list(model.parameters()) if how == "unfrozen" else [p for p in model.parameters() if p.requires_grad]
    given = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    model, optimizer = fleet.distribute(model, given, small_buckets())
    for step in range(STEPS):
        if step == 2:
            for p in joins:
                p.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": joins, "lr": 0.05})
            if how == "added to the given one":
                given.add_param_group({"params": joins, "lr": 0.05})
        if spelling == "bare":
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.minimize(loss_of(model, rank, step))
    return weights(model)


def _joined_alone(how: str) -> Tensor:
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    joins = list(model[2].parameters())
    held = list(model.parameters()) if how == "unfrozen" else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step == 2:
            for p in joins:
                p.requires_grad_(True)
            if how != "unfrozen":
                optimizer.add_param_group({"params": joins, "lr": 0.05})
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("spelling", ["bare", "minimize"])
@pytest.mark.parametrize("how", ["unfrozen", "added", "added to the given one"])
def test_parameters_unfrozen_or_added_in_mid_training_train_from_then_on(how: str, spelling: str) -> None:
    mine = run_ranks(_joining, 2, how, spelling)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], _joined_alone(how), rtol=1e-12, atol=1e-12)


def _replace(model: nn.Module, optimizer: Any, how: str) -> None:
    """As pruning and Gaussian splatting do: a tensor of another shape or values takes a parameter's place, with its state."""
    old = model[2].weight  # type: ignore[index]
    new = nn.Parameter(old.detach() * 2)
    group = next(group for group in optimizer.param_groups if any(p is old for p in group["params"]))
    optimizer.state[new] = {key: value * 2 for key, value in optimizer.state.pop(old, {}).items() if torch.is_tensor(value)}
    if how == "a new group":
        optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]
        optimizer.add_param_group({**group, "params": [new if p is old else p for p in group["params"]]})
    else:
        group["params"] = [new if p is old else p for p in group["params"]]
    model[2].weight = new  # type: ignore[index]


def _replaced(rank: int, how: str, distributed: bool) -> Tensor:
    model = mlp(torch.float64)
    held = [{"params": [p]} for p in model.parameters()]
    optimizer: Any = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    if distributed:
        model, optimizer = fleet.distribute(model, optimizer, small_buckets(find_unused_parameters=how == "unused"))
    for step in range(STEPS):
        if step == 2 and how != "between backward and step":
            _replace(model, optimizer, how)
        for r in [rank] if distributed else [0, 1]:
            loss = loss_of(model, r, step) / (1 if distributed else 2)
            optimizer.backward(loss) if how == "optimizer.backward" and distributed else loss.backward()
        if step == 2 and how == "between backward and step":
            _replace(model, optimizer, how)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("how", ["in its group", "a new group", "unused", "optimizer.backward", "between backward and step"])
def test_a_parameter_replaced_in_model_and_optimizer_trains_from_then_on(how: str) -> None:
    mine, alone = run_ranks(_replaced, 2, how, True), run_ranks(_replaced, 1, how, False)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], alone[0], rtol=1e-12, atol=1e-12)


def _replaced_otherwise(rank: int) -> list[str]:
    told = []
    for change in ("assigned", "parametrized"):
        model, optimizer = make_pair()
        if change == "assigned":
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # type: ignore[index]
        else:
            nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[index]
        loss_of(model, rank, 0).backward()
        told.append(raised(optimizer.step))
    return told


def test_a_parameter_replaced_in_the_model_alone_and_one_that_was_parametrized_are_told_apart() -> None:
    for assigned, parametrized in run_ranks(_replaced_otherwise, 2):
        assert assigned.startswith("ConfigError: `2.weight` of the model is no longer the tensor that the optimizer holds"), (
            assigned
        )
        assert parametrized.startswith("ConfigError: `2.weight` is no parameter of the model any more"), parametrized
        assert "weight_norm" in parametrized and "call fleet.distribute(...)" in parametrized


def _frozen_later(rank: int) -> Tensor:
    model, optimizer = make_pair()
    for step in range(STEPS):
        if step == 2:
            for p in model[2].parameters():
                p.requires_grad_(False)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_parameters_frozen_in_mid_training_stay_as_they_are_without_decay_or_momentum() -> None:
    mine = run_ranks(_frozen_later, 2)
    model = mlp(torch.float64)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 2:
            for p in model[2].parameters():
                p.requires_grad_(False)
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], weights(model), rtol=1e-12, atol=1e-12)


def _changed_models(rank: int) -> list[str]:
    told = []
    model, optimizer = make_pair()
    model.load_state_dict(mlp(torch.float64).state_dict(), assign=True)
    loss_of(model, rank, 0).backward()
    told.append(raised(optimizer.step))
    half = mlp()
    half, optimizer = fleet.distribute(half, sgd(half), small_buckets())
    half.double()
    told.append(raised(loss_of(half, rank, 0).backward))
    model, optimizer = make_pair()
    told.append(raised(lambda: loss_of(model, rank, 0).backward(create_graph=True)))
    return told


def test_replaced_parameters_a_converted_model_and_gradients_with_a_graph_are_one_right_sentence_each() -> None:
    for assigned, converted, graph in run_ranks(_changed_models, 2):
        assert assigned.startswith("FleetError: optimizer.step() found no new gradients") and "assign=True" in assigned
        assert converted.startswith("ConfigError: `4.") and "torch.float64" in converted and "fleet.distribute(...)" in converted
        assert graph.startswith("ConfigError: the gradient of") and "create_graph=True" in graph and "autograd.grad" in graph


def _in_between(rank: int) -> list[str]:
    model = mlp(torch.float64)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model[:4].parameters(), lr=0.1), small_buckets())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_of(model, rank, 0).backward()
        told = [raised(lambda: optimizer.add_param_group({"params": list(model[4].parameters())}))]
        optimizer.step()
    told.append("; ".join(str(w.message) for w in seen if issubclass(w.category, FleetWarning)))
    other, optimizer = make_pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    other[0].requires_grad_(False)
    for step in range(2):
        loss_of(other, rank, step).backward()
        optimizer.step()
    told.append(raised(lambda: loss_of(other, rank, 2).backward()))
    third, _ = make_pair()
    told.append(raised(lambda: third(rows(rank, 0)[0]).sum().backward(create_graph=True)))
    return told


def test_groups_added_between_backward_and_step_unowned_parameters_and_frozen_layers_are_told_or_work() -> None:
    ranks = run_ranks(_in_between, 2)
    for rank, (added, unowned, frozen, graph) in enumerate(ranks):
        assert added.startswith("ConfigError: add_param_group between backward and step()"), added
        assert ("`4.weight` and 1 more parameters are trainable and in no optimizer" in unowned) == (rank == 0), unowned
        assert frozen == "nothing raised"
        assert "create_graph=True" in graph


def _unfrozen_without_optimizer(rank: int) -> list[str]:
    model = mlp(torch.float64)
    model[2].requires_grad_(False)
    model, optimizer = fleet.distribute(model, sgd(nn.ModuleList([model[0], model[4]])), small_buckets(desync_check_steps=100))
    for step in range(10):
        if step == 3:
            model[2].requires_grad_(True)
        loss_of(model, rank, step).backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        if seen and step < 9:
            return [f"too early: {seen[0].message}"]
    return [str(warning.message) for warning in seen]


def test_parameters_unfrozen_in_mid_training_that_no_optimizer_holds_are_told() -> None:
    first, second = run_ranks(_unfrozen_without_optimizer, 2)
    assert len(first) == 1 and first[0].startswith("`2.weight` and 1 more parameters are trainable and in no optimizer"), first
    assert second == []

"""Guards two optimizers that share parameters (CURL, SAC): one pair reduces for both, and errors name that way."""

from __future__ import annotations

import collections

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.ddp_loops import loss_of, make_pair, rows, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


class Shared(nn.Module):
    """One encoder, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(torch.float64)
        width = self.encoder(rows(0, 0)[0]).shape[1]
        self.a, self.b = nn.Linear(width, 3, dtype=torch.float64), nn.Linear(width, 1, dtype=torch.float64)


def _optimizers(model: Shared) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    of = [[*model.encoder.parameters(), *head.parameters()] for head in (model.a, model.b)]
    return torch.optim.SGD(of[0], lr=0.1, momentum=0.9), torch.optim.Adam(of[1], lr=0.01)


def _losses(model: Shared, rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = rows(rank, step)
    return F.cross_entropy(model.a(model.encoder(x)), y % 3), model.b(model.encoder(x)).square().mean()


def _with_one_that_holds_all(rank: int) -> Tensor:
    torch.manual_seed(0)
    model = Shared()
    strategy = fleet.DistributedStrategy(find_unused_parameters=True)
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    optimizers = _optimizers(model)
    for step in range(4):
        for which, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            _losses(model, rank, step)[which].backward()
            optimizer.step()
    return weights(model)


def _by_hand() -> Tensor:
    torch.manual_seed(0)
    model = Shared()
    optimizers = _optimizers(model)
    for step in range(4):
        for which, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            sum(_losses(model, rank, step)[which] / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return weights(model)


def test_two_optimizers_over_one_encoder_step_beside_a_pair_that_holds_all() -> None:
    expected = _by_hand()
    for trained in run_ranks(_with_one_that_holds_all, 2):
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)


def _one_call_for_each(rank: int) -> list[str]:
    model = Shared()
    first, second = _optimizers(model)
    strategy = fleet.DistributedStrategy(find_unused_parameters=True)
    _, ours = fleet.distribute(model, first, strategy)
    unreduced = raised(second.step)
    fleet.distribute(model, second, strategy)
    return [unreduced, raised(ours.step)]


def test_errors_of_shared_parameters_name_the_line_that_works() -> None:
    for unreduced, ended in run_ranks(_one_call_for_each, 2):
        assert unreduced.startswith("ConfigError: the Adam that is stepped here was not given"), unreduced
        assert ended.startswith("ConfigError: this pair has ended"), ended
        for message in (unreduced, ended):
            assert "share" in message and "torch.optim.SGD(model.parameters(), lr=0.1), strategy)" in message


def _state_made_afresh(rank: int) -> tuple[Tensor, int]:
    model, optimizer = make_pair()
    for step in range(3):
        if step == 2:
            optimizer.state = collections.defaultdict(dict)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), len(optimizer.state)


def _state_made_afresh_by_torch() -> Tensor:
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(3):
        if step == 2:
            optimizer.state = collections.defaultdict(dict)
        sum(loss_of(model, rank, step) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_state_that_is_replaced_begins_afresh_as_in_torch() -> None:
    expected = _state_made_afresh_by_torch()
    for trained, entries in run_ranks(_state_made_afresh, 2):
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)
        assert entries == len(list(mlp().parameters()))


def _one_rank_leaves_a_model_out(rank: int) -> str:
    (first, one), (second, two) = make_pair(), make_pair()

    def train() -> None:
        for step in range(2):
            loss = loss_of(first, rank, step)
            if not (rank == 1 and step == 1):
                loss = loss + loss_of(second, rank, step)
            loss.backward()
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()

    return raised(train)


def test_a_loss_that_leaves_a_model_out_on_one_rank_is_named_there() -> None:
    messages = run_ranks(_one_rank_leaves_a_model_out, 2)
    assert "no backward has reached this optimizer's parameters" in messages[1] and "0 * model(x).sum()" in messages[1]


def _plateau(rank: int) -> str:
    model, optimizer = make_pair()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def train() -> None:
        for step in range(12):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(float(step) if rank else -float(step))

    return raised(train)


def test_learning_rates_that_differ_between_ranks_are_named_beside_the_weights() -> None:
    for message in run_ranks(_plateau, 2):
        assert "the ranks no longer hold the same model" in message and "Their learning rates differ: 0.1 on rank 0" in message
        assert 'fleet.util.all_reduce(loss.item(), "mean")' in message

"""Recompute of awkward units: buffers of all kinds, arguments that forward changes, generators of its own, weights it writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx.errors import FleetError
from tests.helpers.recompute_nets import WIDTH, Chain, Inner, Norm, call_three_times
from tests.helpers.recompute_runs import distribute, loss_of, rows, same_in_loop, seed

BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}


# --- other units, other loops -------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Its embedding shortens the rows that it reads, in place, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.leave = nn.Embedding(WIDTH, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.leave(self.rows(ids))


class PassesOn(Inner):
    """Its input is one of its results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, super().forward(x)


class Tied(nn.Module):
    """A weight of the unit is used before and after it too; under autocast all share one 16-bit copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), Inner(), nn.Linear(WIDTH, 4)
        self.unit.enter.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.unit(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("amp", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Chain(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2), lambda unit, x: unit(x[None])[0][0]), id="lstm"),
        pytest.param(lambda: Chain(Words(), lambda unit, x: x + unit(x.argmax(1))), id="embedding with a largest norm"),
        pytest.param(lambda: Chain(PassesOn(), lambda unit, x: sum(unit(x), x)), id="passes its input on"),
        pytest.param(Tied, id="tied weights"),
    ],
)
def test_units_of_other_kinds_are_computed_again_to_the_bit(
    build: Callable[[], nn.Module], amp: dict[str, Any], alone: None
) -> None:
    same_in_loop(build, **amp)


def _parts_called_one_by_one(model: Any, optimizer: Any) -> None:
    for step in range(3):
        x, y = rows(step)
        optimizer.minimize(F.cross_entropy(model.last(model.unit(torch.tanh(model.first(x)))), y))


def test_a_unit_that_is_itself_the_outermost_call_is_computed_again_under_autocast(alone: None) -> None:
    same_in_loop(lambda: Chain(Inner()), _parts_called_one_by_one, **BF16)


def test_two_pairs_side_by_side_train_to_the_same_bits(alone: None) -> None:
    """As a GAN does: the generator's loss runs through the other model's units."""
    found = []
    for recompute in (None, ["unit"]):
        seed()
        (generator, first), (judge, second) = distribute(Chain(Norm()), recompute), distribute(Chain(Norm()), recompute)
        seed(1)
        for step in range(4):
            x, y = rows(step)
            made = generator(x).repeat(1, 2)
            second.minimize(F.cross_entropy(judge(made.detach()), y) - judge(x).mean())
            first.minimize(judge(made).mean())
        found.append((dict(generator.state_dict()), dict(judge.state_dict())))
        del first, second
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class AddsMask(Inner):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + mask


def test_an_input_made_in_inference_mode_can_be_used_as_without_recompute(alone: None) -> None:
    def use(unit: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            mask = torch.linspace(0, 1, WIDTH)
        return unit(x, mask)

    same_in_loop(lambda: Chain(AddsMask(), use))


# --- buffers ----------------------------------------------------------------------------------------------------------------


class Cache(Inner):
    """Made in the first forward, as tables of positions are."""

    def __init__(self, registered: bool) -> None:
        super().__init__(Cache.scale)
        if registered:
            self.register_buffer("table", None)

    def scale(self, x: Tensor) -> Tensor:
        if getattr(self, "table", None) is None:
            self.register_buffer("table", torch.linspace(0.5, 1, x.shape[1]))
        return x * self.table


class UsedOnce(Inner):
    """A buffer that its first forward takes away."""

    def __init__(self) -> None:
        super().__init__(UsedOnce.scale)
        self.register_buffer("start", torch.full((WIDTH,), 2.0))

    def scale(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x, self.start = x * self.start, None
        return x


class PastTheVersion(Inner):
    """A running mean written through `.data`, which torch does not count as a change."""

    def __init__(self, numel: int) -> None:
        super().__init__(PastTheVersion.centre)
        self.register_buffer("mean", torch.zeros(numel))

    def centre(self, x: Tensor) -> Tensor:
        self.mean.data[:WIDTH].mul_(0.9).add_(x.detach().mean(0))
        return x - self.mean[:WIDTH]


class Shared(nn.Module):
    """Two modules of a unit hold one buffer: the first counts it up, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        count = torch.zeros(())
        self.writes, self.reads = Inner(lambda unit, x: x + unit.count.add_(1)), Inner(lambda unit, x: x / unit.count)
        self.writes.register_buffer("count", count)
        self.reads.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.writes(x))


class Sparse(Inner):
    """A graph's edges, made by the first forward, and by each replaced with longer ones."""

    def __init__(self) -> None:
        super().__init__(Sparse.spread)
        self.register_buffer("edges", None, persistent=False)

    def spread(self, x: Tensor) -> Tensor:
        self.edges = torch.eye(WIDTH).to_sparse() if self.edges is None else (self.edges * 1.5).coalesce()
        return (self.edges @ x.T).T


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(lambda: Cache(registered=True), id="made in the first forward, declared before"),
        pytest.param(lambda: Cache(registered=False), id="made in the first forward"),
        pytest.param(UsedOnce, id="taken away by the first forward"),
        pytest.param(lambda: PastTheVersion(WIDTH), id="written through data"),
        pytest.param(lambda: PastTheVersion(20_000), id="written through data, large"),
        pytest.param(Shared, id="shared by two modules"),
        pytest.param(Sparse, id="sparse"),
    ],
)
def test_a_buffer_has_in_the_second_run_what_it_had_in_the_first(unit: Callable[[], nn.Module], alone: None) -> None:
    same_in_loop(lambda: Chain(unit()))


class LateWrite(Inner):
    """Writes its large buffer from the second step on."""

    def __init__(self) -> None:
        super().__init__(LateWrite.write)
        self.register_buffer("large", torch.zeros(20_000))
        self.calls = 0

    def write(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:  # the first step makes two
            self.large.add_(1)
        return x + self.large[:WIDTH]


def test_a_large_buffer_written_first_in_a_later_call_is_an_error_that_names_unit_and_buffer(alone: None) -> None:
    model, optimizer = distribute(Chain(LateWrite()), ["unit"])
    optimizer.minimize(loss_of(model, 0))
    with pytest.raises(FleetError, match=r"`unit` changes the buffer `large` in place \(first in a later call"):
        model(rows(1)[0])


# --- arguments that forward changes -----------------------------------------------------------------------------------------


class TakesSkip(Inner):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x + skips.pop())


class LeavesSkip(Inner):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
        skips.append(super().forward(x))
        return skips[-1]


def test_a_unit_may_leave_results_in_a_list_that_it_is_given(alone: None) -> None:
    def use(unit: nn.Module, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        return unit(unit(x, skips), skips) * skips.pop() + skips.pop()

    same_in_loop(lambda: Chain(LeavesSkip(), use))


def test_a_unit_may_take_tensors_out_of_a_list_that_it_is_given(alone: None) -> None:
    same_in_loop(lambda: Chain(TakesSkip(), lambda unit, x: unit(x, [torch.sin(x)])))


# --- random numbers -----------------------------------------------------------------------------------------------------------


class OwnGenerator(Inner):
    """Held as an attribute, or handed over in the call."""

    def __init__(self, generator: Any, draw: Callable[[Any, int], Any]) -> None:
        super().__init__(lambda self, x: x * torch.as_tensor(self.draw(self.generator, WIDTH), dtype=x.dtype))
        self.generator, self.draw = generator, draw

    def forward(self, x: Tensor, generator: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(x) if generator is None else super().forward(x) * float(self.draw(generator, 1)[0])


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda held, count: torch.rand(count, generator=held)),
    "python": (lambda: random.Random(3), lambda held, count: [held.gauss(0, 1) for _ in range(count)]),
    "numpy": (lambda: np.random.default_rng(3), lambda held, count: held.random(count)),
    "old numpy": (lambda: np.random.RandomState(3), lambda held, count: held.randn(count)),
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("as_argument", [False, True])
def test_a_generator_that_a_unit_holds_or_is_given_gives_the_same_numbers_again(
    kind: str, as_argument: bool, alone: None
) -> None:
    make, draw = GENERATORS[kind]

    def build() -> nn.Module:
        given = make()
        return Chain(OwnGenerator(make(), draw), lambda unit, x: unit(x, given) if as_argument else unit(x))

    same_in_loop(build)


class DrawsLate(Inner):
    """From its fifth call on, and only as many numbers as it is told to: of a pair of normal ones, one is left over."""

    def __init__(self, draw: Callable[[], float], calls: int) -> None:
        super().__init__(DrawsLate.scale)
        self.draw, self.begins = draw, calls
        self.register_buffer("calls", torch.zeros(()))

    def scale(self, x: Tensor) -> Tensor:
        return x * self.draw() if self.calls.add_(1) > self.begins else x


@pytest.mark.parametrize("begins", [0, 1, 4, 5])
@pytest.mark.parametrize("spare", [False, True], ids=["", "with a spare number at hand"])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda: np.random.randn(), id="numpy's normal"),
        pytest.param(lambda: random.gauss(0, 1), id="python's normal"),
        pytest.param(lambda: np.random.rand() + random.random(), id="uniform"),
    ],
)
def test_random_numbers_of_python_and_numpy_are_the_same_again_whenever_they_are_first_drawn(
    draw: Callable[[], float], spare: bool, begins: int, alone: None
) -> None:
    def loop(model: Any, optimizer: Any) -> None:
        if spare:
            np.random.randn(), random.gauss(0, 1)
        for step in range(3):
            optimizer.minimize(loss_of(model, step))

    same_in_loop(lambda: Chain(DrawsLate(draw, begins), call_three_times), loop)


# --- weights ------------------------------------------------------------------------------------------------------------------


def test_an_embedding_with_a_largest_norm_may_be_called_several_times_and_computed_again_twice(alone: None) -> None:
    def loop(model: Any, optimizer: Any) -> None:
        for step in range(3):
            loss = loss_of(model, step)
            loss.backward(retain_graph=True)
            optimizer.minimize(loss)

    same_in_loop(lambda: Chain(Words(), lambda unit, x: x + unit(x.argmax(1)) * unit(x.argmin(1))), loop)


def test_weights_that_were_there_for_the_forward_alone_are_there_again(alone: None) -> None:
    found = []
    for recompute in (None, ["unit"]):
        seed()
        model, _ = distribute(Chain(Norm()), recompute)
        weights = {name: (2 * weight).detach().requires_grad_() for name, weight in model.named_parameters()}
        x, y = rows(0)
        F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()
        assert all(weight.grad is None for weight in model.parameters())
        found.append({name: weight.grad for name, weight in weights.items()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_unit_that_changes_its_own_weight_in_forward_is_an_error_that_names_both(alone: None) -> None:
    def shrink(unit: Inner, x: Tensor) -> Tensor:
        with torch.no_grad():
            unit.leave.weight.mul_(0.9)
        return x

    model, _ = distribute(Chain(Inner(shrink)), ["unit"])
    with pytest.raises(FleetError, match=r"`unit` changes the weight `leave\.weight` in place .*or leave it out of"):
        model(rows(0)[0])

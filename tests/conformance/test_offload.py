"""Inputs of recomputed units in host memory: training is the same to the bit, the device keeps less, the host does not fill."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.modules.patching import patched
from fleetx.errors import ConfigError, FleetWarning, RecomputeError
from fleetx.recompute.offload import Offload
from fleetx.recompute.replay import Replay
from tests.helpers.budget_nets import allocated_in, feed_forward
from tests.helpers.parking_runs import MOVERS, EarlyMover, LateMover, use_mover
from tests.helpers.recompute_nets import NETS, WIDTH, Chain, EncoderDecoder, Inner, Net, Norm, call_three_times
from tests.helpers.recompute_runs import (
    Loop,
    assert_ran_again,
    assert_same,
    distribute,
    evaluated_before_backward,
    gradient_penalty,
    loss_of,
    one_loss_twice,
    random_now,
    rows,
    seed,
    three_steps,
    train,
)

AMP = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None:
    """Every test here."""


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of the one for a GPU."""
    return use_mover(monkeypatch, MOVERS[request.param]())


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateMover:
    return use_mover(monkeypatch, LateMover())


def equal_with_and_without(net: Net, mover: EarlyMover, **settings: Any) -> None:
    without, ours = train(net, False, **settings), train(net, True, offload=True, **settings)
    assert_same(ours, without)
    assert_ran_again(ours, without)
    assert mover.out and mover.back


# --- to the bit -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_five_updates_with_offload_are_those_without_recompute(name: str, mover: Any) -> None:
    equal_with_and_without(NETS[name], mover)


@pytest.mark.parametrize("name", ["convolutions", "u-net", "torch transformer", "encoder and decoder", "called three times"])
@pytest.mark.parametrize("settings", [AMP, MERGED | {"merged": 2}], ids=["bfloat16", "merged"])
def test_under_autocast_and_with_merged_gradients_too(name: str, settings: dict[str, Any], late: LateMover) -> None:
    equal_with_and_without(NETS[name], late, **settings)


def _gradients_asked_for(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        torch.autograd.grad(loss, [model.last.weight, model.unit.leave.weight], retain_graph=True)
        optimizer.minimize(loss)


def _several_forwards(model: Any, optimizer: Any) -> None:
    """Their backwards in another order than the reverse; one has none."""
    for step in range(0, 9, 3):
        losses = [loss_of(model, step + i) for i in range(3)]
        loss_of(model, 100)
        losses[1].backward()
        losses[2].backward()
        losses[0].backward()
        optimizer.step()
        optimizer.zero_grad()


def _graphs_thrown_away(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        loss_of(model, 20 + step)
        optimizer.minimize(loss)
        loss_of(model, 30 + step)


def _lengths_that_change(model: Any, optimizer: Any) -> None:
    for step, count in enumerate((6, 9, 3, 9)):
        x, y = rows(step, count)
        optimizer.minimize(F.cross_entropy(model(x), y))


LOOPS = [
    three_steps,
    one_loss_twice,
    _gradients_asked_for,
    gradient_penalty,
    _several_forwards,
    evaluated_before_backward,
    _graphs_thrown_away,
    _lengths_that_change,
]


def in_loop(build: Callable[[], nn.Module], loop: Loop, **settings: Any) -> Any:
    seed()
    model, optimizer = distribute(build(), **settings)
    seed(1)
    loop(model, optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}, random_now()


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_any_form_end_with_the_same_bits(loop: Loop, mover: Any) -> None:
    def build() -> nn.Module:
        return Chain(Norm(), call_three_times)

    plain, ours = in_loop(build, loop, recompute=None), in_loop(build, loop, recompute=["unit"], offload=True)
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0)
    assert ours[1] == plain[1] and mover.back


class Slope(Inner):
    """Takes a gradient by its input, which it is given twice, inside its forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        (slope,) = torch.autograd.grad(torch.tanh(self.enter(x * y)).square().sum(), x, create_graph=True)
        return torch.tanh(self.leave(y) + slope)


def test_an_input_given_twice_is_one_tensor_again_and_parked_once(late: LateMover) -> None:
    def build() -> nn.Module:
        return Chain(Slope(), lambda unit, x: unit(x, x))

    plain, ours = in_loop(build, three_steps, recompute=None), in_loop(build, three_steps, recompute=["unit"], offload=True)
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0)
    assert late.out == late.back == 3


class Sized(nn.Module):
    """Blocks in a row; their inputs have all kinds of layout."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.unit, self.change = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1), change

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(self.change(self.first(x.view(-1, 1, 2, 4)))).mean((2, 3))


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        (lambda x: torch.sin(x).to(memory_format=torch.channels_last), 1),
        (torch.sin, 1),
        (lambda x: torch.sin(x)[:, :, :, :3], 0),
        (lambda x: torch.sin(x).transpose(2, 3), 0),
        (lambda x: torch.sin(x[:, :, :, :1]).expand(-1, -1, -1, 3), 0),
    ],
    ids=["channels last", "plain", "a part", "a view", "expanded"],
)
def test_an_input_comes_back_in_its_layout_and_views_stay(
    change: Callable[[Tensor], Tensor], copies: int, late: LateMover
) -> None:
    layouts: list[tuple[int, ...]] = []

    def noted(x: Tensor) -> Tensor:
        x = change(x)
        return x

    def build() -> nn.Module:
        model = Sized(noted)
        model.unit.register_forward_pre_hook(lambda module, args: layouts.append(args[0].stride()))
        return model

    plain, ours = in_loop(build, three_steps, recompute=None), in_loop(build, three_steps, recompute=["unit"], offload=True)
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0)
    assert late.out == late.back == 3 * copies and len(set(layouts)) == 1


# --- what moves -----------------------------------------------------------------------------------------------------------------


def test_a_memory_that_every_decoder_layer_is_given_is_parked_and_fetched_once(late: LateMover) -> None:
    model, optimizer = distribute(EncoderDecoder(), ["decoder.*"], offload=True)
    optimizer.minimize(loss_of(model, 0))
    assert (late.out, late.back) == (2, 2)  # the memory, and what the first decoder layer gives the second


def test_a_segment_whose_first_unit_parks_has_its_input_back_once_for_all_its_units(mover: Any) -> None:
    """Units 0-1 stored, 2 offloaded, 3 and 4 join it, 5 offloaded, 6 joins it, 7 computed again on its own."""
    torch.manual_seed(0)
    model, x = row_of_blocks(), torch.randn(BATCH, WIDE)
    torch.manual_seed(1)
    model(x).square().sum().backward()
    theirs = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    offload, made = Offload(mover), dict[int, Replay]()
    for unit in range(2, BLOCKS):
        joins = made[unit - 1] if unit in (3, 4, 6) else None
        places = None if unit in (2, 5) else ()
        made[unit] = Replay(str(unit), model[unit], torch.device("cpu"), joins=joins, offload=offload, offload_places=places)
    with patched((model[unit], replay) for unit, replay in made.items()):
        torch.manual_seed(1)
        loss = model(x).square().sum()
        assert (mover.out, mover.back, offload.pool.host_bytes) == (2, 0, 2 * INPUT)
        loss.backward(retain_graph=True)
        assert (mover.out, mover.back) == (2, 2)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], theirs, rtol=0, atol=0)
        loss.backward()
        assert (mover.out, mover.back) == (2, 4)
        doubled = [2 * gradient for gradient in theirs]
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], doubled, rtol=0, atol=0)
        del loss
    assert offload.pool.idle_bytes == offload.pool.host_bytes == 2 * INPUT


def test_nothing_moves_without_gradients(late: LateMover) -> None:
    model, _ = distribute(Chain(Inner()), ["unit"], offload=True)
    with torch.no_grad():
        loss_of(model, 0)
    with torch.inference_mode():
        loss_of(model, 0)
    assert (late.out, late.back) == (0, 0)


def test_the_users_batch_and_weights_given_to_a_unit_stay(late: LateMover) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit, self.weight = nn.Bilinear(WIDTH, WIDTH, 4), nn.Parameter(torch.ones(6, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(x, self.weight)

    model, optimizer = distribute(Given(), ["unit"], offload=True)
    optimizer.minimize(loss_of(model, 0))
    assert (late.out, late.back) == (0, 0)


# --- changed in place -----------------------------------------------------------------------------------------------------------


class ChangedAfter(nn.Module):
    """What the unit was given is doubled after it; nothing else needs it."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), Inner(), nn.Linear(WIDTH, 4)
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        given = torch.sin(self.first(x))
        out = self.unit(given)
        if self.changes:
            with torch.no_grad():
                given.mul_(2)
        return self.last(out)


def test_a_change_after_the_unit_is_an_error_without_offload_and_of_no_account_with_it(late: LateMover) -> None:
    with pytest.raises(RecomputeError, match="an input of `unit` was changed in place after its forward"):
        in_loop(lambda: ChangedAfter(changes=True), three_steps, recompute=["unit"])
    gc.collect()
    theirs = in_loop(lambda: ChangedAfter(changes=False), three_steps, recompute=None)
    ours = in_loop(lambda: ChangedAfter(changes=True), three_steps, recompute=["unit"], offload=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)


def test_a_tensor_changed_between_two_units_is_parked_again(late: LateMover) -> None:
    def use(unit: nn.Module, x: Tensor) -> Tensor:
        x = torch.sin(x) + 0
        first = unit(x)
        with torch.no_grad():
            x.mul_(2)
        return first + unit(x)

    model, optimizer = distribute(Chain(nn.Linear(WIDTH, WIDTH), use), ["unit"], offload=True)
    optimizer.minimize(loss_of(model, 0))
    assert (late.out, late.back) == (2, 2)


def test_a_unit_that_changes_its_own_input_is_refused_by_name(late: LateMover) -> None:
    model, optimizer = distribute(Chain(nn.Sequential(nn.ReLU(inplace=True), Inner())), ["unit"], offload=True)
    with pytest.raises(RecomputeError, match="`unit` changes an input in place"):
        optimizer.minimize(loss_of(model, 0))


# --- bytes ----------------------------------------------------------------------------------------------------------------------

WIDE, BATCH, BLOCKS = 64, 512, 8
INPUT = WIDE * BATCH * 4
"""Bytes between two blocks."""
RANDOM_STATE = 5056
"""Bytes of torch's generator that each unit computed again keeps."""


def row_of_blocks() -> nn.Sequential:
    return nn.Sequential(*(feed_forward(WIDE) for _ in range(BLOCKS)))


def parked(model: nn.Sequential, mover: Any, **which: Any) -> Any:
    offload = Offload(mover)
    return offload, patched((block, Replay(str(i), block, torch.device("cpu"), offload=offload)) for i, block in enumerate(model))


def plain(model: nn.Sequential) -> Any:
    return patched((block, Replay(str(i), block, torch.device("cpu"))) for i, block in enumerate(model))


def test_from_forward_to_backward_the_device_keeps_no_input_but_the_first_and_a_step_peaks_lower() -> None:
    """EarlyMover's copies: a late one would hold both ends until a caller waits, which a GPU's do not."""
    torch.manual_seed(0)
    model, x = row_of_blocks(), torch.randn(BATCH, WIDE)
    kept, peaks = [], []
    for patches in (plain(model), parked(model, EarlyMover())[1]):
        with patches:
            model(x).sum().backward()  # gradients are there from now on
            losses: list[Tensor] = []
            kept.append(allocated_in(lambda losses=losses: losses.append(model(x).sum())).left)
            losses.clear()
            peaks.append(allocated_in(lambda: model(x).sum().backward()).peak)
    assert kept[0] - kept[1] == (BLOCKS - 1) * INPUT
    # Without, the last block but one runs again with six inputs in use (the user's does not count); with, its own and the next.
    # The gradient between blocks is there in both, and some random states.
    assert abs(peaks[0] - peaks[1] - (BLOCKS - 4) * INPUT) < RANDOM_STATE * BLOCKS


def test_host_memory_is_used_again_from_step_to_step_and_given_back_whatever_becomes_of_a_step() -> None:
    torch.manual_seed(0)
    model, x = row_of_blocks(), torch.randn(BATCH, WIDE)
    offload, patches = parked(model, LateMover())
    fail = False

    def hook(module: nn.Module, args: Any) -> None:
        if fail:
            raise KeyError("on purpose")

    model[5][1].register_forward_pre_hook(hook)
    with patches:
        for step in range(20):
            loss = model(x).sum()
            in_use = offload.pool.host_bytes - offload.pool.idle_bytes
            assert in_use == (BLOCKS - 1) * INPUT
            if step % 4 == 3:
                fail = True
                with pytest.raises(KeyError):
                    model(x)
                fail = False
            if step % 4 == 1:
                torch.autograd.grad(loss, [model[6][0].weight])  # and no further
            if step % 4 in (0, 3):
                loss.backward()
            del loss
            gc.collect()
            assert offload.pool.idle_bytes == offload.pool.host_bytes
            at_most = (BLOCKS - 1 if step < 3 else 2 * (BLOCKS - 1)) * INPUT  # of a forward that fails, while another's is kept
            assert offload.pool.host_bytes <= at_most


def test_batches_of_many_lengths_take_no_more_buffers_than_one() -> None:
    torch.manual_seed(0)
    model = row_of_blocks()
    offload, patches = parked(model, LateMover())
    with patches:
        for count in (17, 400, 3, 512, 256, 511, 100):
            model(torch.randn(count, WIDE)).sum().backward()
    assert offload.pool.host_bytes <= (BLOCKS - 1) * INPUT


def test_host_memory_that_cannot_be_had_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(EarlyMover):
        def buffer(self, size: int) -> Tensor:
            raise RuntimeError("CUDA error: out of memory\nand more")

    use_mover(monkeypatch, Full())
    model, optimizer = distribute(Chain(Inner()), ["unit"], offload=True)
    told = 'offload"\\] asked the host for 192 B of pinned memory beside 0 B .*CUDA error: out of memory\\)'
    with pytest.raises(ConfigError, match=told):
        optimizer.minimize(loss_of(model, 0))


# --- on a CPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_on_a_cpu_a_warning_says_that_there_is_nothing_to_move_and_training_is_the_same(budget: str | None) -> None:
    found = []
    for configs in ({"offload": True, "checkpoints": ["unit"], "budget": budget}, None):
        seed()
        model = Chain(Inner())
        strategy = fleet.DistributedStrategy(recompute=configs is not None)
        if configs is not None:
            strategy.recompute_configs = configs
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if configs is None:
            model, optimizer = fleet.distribute(model, inner, strategy)
        else:
            with pytest.warns(FleetWarning, match="whose memory is the host's: there is nothing to move") as told:
                model, optimizer = fleet.distribute(
                    model, inner, strategy, sample=rows(0), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])
                )
            assert len(told) == 1
        seed(1)
        three_steps(model, optimizer)
        found.append(dict(model.state_dict()))
        del optimizer
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

"""Loops that people write, on two ranks. Each must end where an independent loop ends: plain torch in one process on the
joined batch, or DDP. Float64 and a tolerance of 1e-12, so that only the order of additions may differ."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fleetx import fleet
from fleetx.engine.report import Report
from fleetx.engine.sidecar import ALARMS
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp

STEPS = 6
TOLERANCE = 1e-12
Optimizer = torch.optim.Optimizer


# --- what the tests share -------------------------------------------------------------------------------------------


def rows_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, dtype=torch.float64)


def joined_rows(step: int) -> tuple[Tensor, Tensor]:
    (x0, y0), (x1, y1) = rows_of(0, step), rows_of(1, step)
    return torch.cat([x0, x1]), torch.cat([y0, y1])


def net() -> nn.Sequential:
    return mlp(torch.float64)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_equal_on_all_ranks(ranks: Sequence[Any]) -> None:
    for other in ranks[1:]:
        torch.testing.assert_close(other, ranks[0], rtol=0, atol=0)


def assert_trained_alike(ranks: Sequence[Any], reference: Any) -> None:
    """The same bits on all ranks, and the reference up to the order of additions."""
    assert_equal_on_all_ranks(ranks)
    torch.testing.assert_close(ranks[0], reference, rtol=TOLERANCE, atol=TOLERANCE)


def plain_loop(
    make: Callable[[], nn.Module] = net, make_optimizer: Callable[[nn.Module], Optimizer] = sgd, steps: int = STEPS
) -> Tensor:
    """One process, the joined batch, torch alone."""
    model = make()
    optimizer = make_optimizer(model)
    for step in range(steps):
        x, y = joined_rows(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


def quiet_about_speed() -> None:
    """On many CPUs 16 bits are slower than float32, and amp says so; warnings are errors in these processes."""
    warnings.filterwarnings("ignore", message="amp:")


# --- the three spellings of a micro-step ----------------------------------------------------------------------------


def _spelled(rank: int, spelling: str, period: int) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=period > 1, gradient_merge_configs={"k_steps": period})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        if spelling == "minimize":
            optimizer.minimize(loss)
        elif spelling == "three calls":
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        elif spelling == "zero first":
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
        elif spelling == "bare":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert spelling == "bare, zero first, to zeros"
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
    return weights(model)


def _plain_merged(period: int) -> Tensor:
    model = net()
    optimizer = sgd(model)
    for first in range(0, STEPS, period):
        losses = []
        for step in range(first, first + period):
            x, y = joined_rows(step)
            losses.append(F.cross_entropy(model(x), y))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("spelling", ["minimize", "three calls", "zero first", "bare", "bare, zero first, to zeros"])
def test_every_spelling_of_a_step_equals_one_process_on_the_joined_batch(spelling: str, period: int) -> None:
    assert_trained_alike(run_ranks(_spelled, 2, spelling, period), _plain_merged(period))


def test_a_plain_python_process_trains_exactly_as_torch_alone() -> None:
    script = """
        import torch
        from tests.helpers.models import batch, mlp
        from torch.nn import functional as F
        from fleetx import fleet

        fleet.init()
        ours, alone = mlp(), mlp()
        assert (fleet.worker_index(), fleet.worker_num()) == (0, 1)
        ours, optimizer = fleet.distribute(ours, torch.optim.Adam(ours.parameters()))
        reference = torch.optim.Adam(alone.parameters())
        for step in range(4):
            x, y = batch(step)
            report = optimizer.minimize(F.cross_entropy(ours(x), y))
            assert (report.due, report.updated, report.bytes_sent) == (True, True, 0)
            F.cross_entropy(alone(x), y).backward()
            reference.step()
            reference.zero_grad()
        for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a, b)
        print("the same bits")
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "PMI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout


# --- learning rates -------------------------------------------------------------------------------------------------


def _schedule(kind: str, optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5) if kind == "StepLR" else LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _scheduled(rank: int, kind: str, when: str) -> tuple[Tensor, list[float]]:
    model = net()
    inner = sgd(model)
    scheduler = _schedule(kind, inner) if when == "before" else None
    model, optimizer = fleet.distribute(model, inner)
    scheduler = scheduler or _schedule(kind, optimizer)
    rates = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        report = optimizer.minimize(F.cross_entropy(model(x), y))
        assert report.due
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates


def _plain_scheduled(kind: str) -> tuple[Tensor, list[float]]:
    model = net()
    optimizer = sgd(model)
    scheduler = _schedule(kind, optimizer)
    rates = []
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR"])
def test_a_scheduler_made_before_or_after_distribute_sets_the_rate_that_is_used(kind: str, when: str) -> None:
    # torch warns of a scheduler that steps before its optimizer, or whose optimizer was exchanged: here that is an error.
    assert_trained_alike(run_ranks(_scheduled, 2, kind, when), _plain_scheduled(kind))


def _two_rates(model: nn.Module) -> torch.optim.SGD:
    first, second, *rest = list(model.parameters())
    groups = [{"params": [first, second], "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _grouped(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, _two_rates(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


def test_parameter_groups_keep_their_own_rate_and_decay() -> None:
    assert_trained_alike(run_ranks(_grouped, 2), plain_loop(make_optimizer=_two_rates))


def _identities(rank: int) -> list[bool]:
    model = net()
    inner = _two_rates(model)
    groups, params = list(inner.param_groups), [p for group in inner.param_groups for p in group["params"]]
    _, optimizer = fleet.distribute(model, inner)
    now = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        optimizer.param_groups[0] is inner.param_groups[0],
        all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True)),
        all(a is b for a, b in zip(params, now, strict=True)),
        isinstance(optimizer, Optimizer),
    ]


def test_the_group_dicts_are_the_very_ones_of_the_optimizer_given() -> None:
    assert run_ranks(_identities, 2) == [[True] * 4] * 2


class WithoutRate(Optimizer):
    """An optimizer of the user's own. Adafactor with relative steps has no learning rate either: its lr is None."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


def _without_rate(rank: int, defaults: dict[str, Any]) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, WithoutRate(model.parameters(), defaults))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["no lr", "lr is None"])
def test_an_optimizer_without_a_learning_rate_is_driven_like_any_other(defaults: dict[str, Any]) -> None:
    reference = plain_loop(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert_trained_alike(run_ranks(_without_rate, 2, defaults), reference)


# --- copies ---------------------------------------------------------------------------------------------------------


def _ema(rank: int, made: str) -> tuple[Tensor, Tensor]:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    averaged: AveragedModel | None = None
    for step in range(STEPS):
        if averaged is None and (made == "at once" or step == 2):
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
        if averaged is not None:
            averaged.update_parameters(model)
    assert averaged is not None
    return weights(averaged.module), averaged(rows_of(0, 99)[0]).detach()


def _plain_ema(made: str) -> tuple[Tensor, Tensor]:
    model = net()
    optimizer = sgd(model)
    average: Tensor | None = weights(model).clone() if made == "at once" else None
    updates = 0
    for step in range(STEPS):
        if step == 2 and average is None:
            average = weights(model).clone()
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            # The first update of an AveragedModel takes the weights as they are.
            average = weights(model).clone() if updates == 0 else 0.9 * average + 0.1 * weights(model)
            updates += 1
    assert average is not None
    nn.utils.vector_to_parameters(average, model.parameters())
    return average, model(rows_of(0, 99)[0]).detach()


@pytest.mark.parametrize("made", ["at once", "in mid-training"])
def test_an_ema_copy_made_after_distribute_follows_the_weights(made: str) -> None:
    assert_trained_alike(run_ranks(_ema, 2, made), _plain_ema(made))


def _independent_copy(rank: int, amp: bool, trained: bool) -> dict[str, Any]:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if trained:
        x, y = batch(rank)
        optimizer.minimize(F.cross_entropy(model(x), y))
    averaged = AveragedModel(model)
    x, y = batch(50)
    plain = mlp()
    plain.load_state_dict(averaged.module.state_dict())
    before = averaged(x).detach()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    after = averaged(x).detach()
    F.cross_entropy(averaged(x), y).backward()
    return {
        "class kept": type(averaged.module) is type(plain),
        "moved": not torch.equal(before, after),
        "computes as a plain module": torch.equal(before, plain(x).detach()),
        "gradients of the original": [p.grad is not None for p in model.parameters()],
        "step after the copy's backward": raised(optimizer.step),
        "second copy": torch.equal(copy.deepcopy(averaged)(x).detach(), before),
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_copy_computes_with_its_own_weights_and_is_none_of_our_business(amp: bool, trained: bool) -> None:
    for seen in run_ranks(_independent_copy, 2, amp, trained):
        assert seen["class kept"]
        assert not seen["moved"]
        assert seen["computes as a plain module"]
        assert not any(seen["gradients of the original"])
        assert "found no new gradients" in seen["step after the copy's backward"]
        assert seen["second copy"]


def _saved_whole(rank: int, amp: bool, trained: bool) -> bool:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    x, y = batch(rank)
    if trained:
        optimizer.minimize(F.cross_entropy(model(x), y))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    return torch.equal(loaded(x), plain(x))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_saved_whole_loads_as_a_plain_module(amp: bool, trained: bool) -> None:
    assert run_ranks(_saved_whole, 2, amp, trained) == [True, True]


# --- what happens between the calls ---------------------------------------------------------------------------------


def _clipped_by_hand(rank: int) -> tuple[Tensor, list[float]]:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    norms = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


def test_clipping_by_hand_between_backward_and_step_equals_clipping_in_one_process() -> None:
    model = net()
    optimizer = sgd(model)
    norms = []
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    assert max(norms) > 0.2, "or nothing was clipped"
    assert_trained_alike(run_ranks(_clipped_by_hand, 2), (weights(model), norms))


def _two_forwards(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        (x, y), (other_x, other_y) = rows_of(rank, step), rows_of(rank, 100 + step)
        optimizer.minimize(F.cross_entropy(model(x), y) + 2 * F.cross_entropy(model(other_x), other_y))
    return weights(model)


def test_two_forwards_for_one_backward_add_up() -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        (x, y), (other_x, other_y) = joined_rows(step), joined_rows(100 + step)
        (F.cross_entropy(model(x), y) + 2 * F.cross_entropy(model(other_x), other_y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_two_forwards, 2), weights(model))


def _thrown_away(rank: int, what: str, who_zeroes: str) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        x, y = rows_of(rank, 100 + step)
        unwanted = F.cross_entropy(model(x), y)
        if what == "backward":
            unwanted.backward()
        if what == "optimizer.backward":
            optimizer.backward(unwanted)
        if what == "part of a backward":
            (model[4].weight.sum() * unwanted.detach()).backward()
        if who_zeroes == "optimizer":
            optimizer.zero_grad()
        if who_zeroes == "model":
            model.zero_grad()
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize(
    ("what", "who_zeroes"),
    [
        ("forward", "nobody"),
        ("backward", "optimizer"),
        ("part of a backward", "optimizer"),
        ("optimizer.backward", "optimizer"),
        ("backward", "model"),
        ("part of a backward", "model"),
    ],
)
def test_work_that_is_thrown_away_leaves_no_trace(what: str, who_zeroes: str) -> None:
    assert_trained_alike(run_ranks(_thrown_away, 2, what, who_zeroes), plain_loop())


def _two_bare_backwards(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        for x, y in (rows_of(rank, step), rows_of(rank, 100 + step)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_gradients_of_two_bare_backwards_add_up_as_in_torch() -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        for x, y in (joined_rows(step), joined_rows(100 + step)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_two_bare_backwards, 2), weights(model))


class WithLoss(nn.Module):
    """Its loss is a method that calls the children and never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.head = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not the way in")

    def loss(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(rows[0]))), rows[1])


def _by_method(rank: int) -> Tensor:
    model = WithLoss()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        optimizer.minimize(model.loss(rows_of(rank, step)))
    return weights(model)


def test_any_method_of_the_model_may_compute_the_loss() -> None:
    ranks = run_ranks(_by_method, 2)
    torch.manual_seed(1234)  # as the harness does: the head is drawn after the body's own seed
    model = WithLoss()
    optimizer = sgd(model)
    for step in range(STEPS):
        model.loss(joined_rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(ranks, weights(model))


def _images(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, shape=(1, 6, 6), dtype=torch.float64)


def _evaluated_alone(rank: int) -> tuple[Tensor, Tensor]:
    model = cnn().double()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = _images(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
        if rank == 0 and step % 2:
            model.eval()
            with torch.no_grad():
                first = model(_images(0, 70)[0])
            assert torch.equal(first, model(_images(0, 70)[0]))
            model.train()
    return weights(model), flat_state(model)


def _ddp(rank: int, steps: int = STEPS) -> Tensor:
    model = cnn().double()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model)
    for step in range(steps):
        x, y = _images(rank, step)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_rank_0_may_evaluate_alone_in_mid_training() -> None:
    ours = run_ranks(_evaluated_alone, 2)
    assert_equal_on_all_ranks([state for _, state in ours])
    assert_trained_alike([trained for trained, _ in ours], run_ranks(_ddp, 2)[0])


# --- gradients in the user's hands ----------------------------------------------------------------------------------


def _zeroed_in_mid_window(rank: int, find_unused: bool) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": 3}, find_unused_parameters=find_unused
    )
    if find_unused:
        model.append(nn.Linear(4, 4, dtype=torch.float64))  # never called: its bucket is not complete before the end
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        model.zero_grad()
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model[:5](x), y))
    return weights(model[:5])


@pytest.mark.parametrize("find_unused", [False, True])
def test_model_zero_grad_inside_a_merge_window_loses_nothing(find_unused: bool) -> None:
    assert_trained_alike(run_ranks(_zeroed_in_mid_window, 2, find_unused), _plain_merged(3))


def _replaced(rank: int, clip: bool, spelling: str) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(clip_norm=clip, clip_norm_configs={"max_norm": 0.5}) if clip else None
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sign() + 1.0
        model[0].bias.grad = None
        optimizer.step()
        if spelling == "zeroed":
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("spelling", ["zeroed", "not zeroed"])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_the_user_replaced_are_the_ones_applied(clip: bool, spelling: str) -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sign() + 1.0
        model[0].bias.grad = None
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_replaced, 2, clip, spelling), weights(model))


class Heads(nn.Module):
    """Heads that a batch may or may not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(8, 4, dtype=torch.float64)
        self.sometimes = nn.Linear(8, 4, dtype=torch.float64)
        self.once = nn.Linear(8, 4, dtype=torch.float64)
        self.never = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out = self.always(x)
        if rank == 0:
            out = out + self.sometimes(x)
        if step == 0:
            out = out + self.once(x)
        return out


def _decaying(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _partly_used(rank: int, spelling: str) -> tuple[list[str], Tensor, Tensor]:
    model = Heads()
    strategy = fleet.DistributedStrategy(find_unused_parameters=True, fuse_grad_size_in_MB=0.0003)
    model, optimizer = fleet.distribute(model, _decaying(model), strategy)
    once = torch.zeros(0)
    without: list[str] = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x, rank, step), y)
        if spelling == "bare":
            loss.backward()
        else:
            optimizer.backward(loss)
            without = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
        if step == 0:
            once = weights(model.once).clone()
        optimizer.zero_grad()
    return without, weights(model), once


@pytest.mark.parametrize("spelling", ["optimizer.backward", "bare"])
def test_a_head_unused_on_one_rank_adds_zeros_and_one_unused_on_all_does_not_move(spelling: str) -> None:
    ranks = run_ranks(_partly_used, 2, spelling)
    model = Heads()
    at_start = weights(model.never).clone()
    optimizer = _decaying(model)
    for step in range(STEPS):
        losses = [F.cross_entropy(model(x, rank, step), y) for rank in range(2) for x, y in [rows_of(rank, step)]]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike([trained for _, trained, _ in ranks], weights(model))
    for without, trained, once in ranks:
        if spelling != "bare":
            assert without == ["once.weight", "once.bias", "never.weight", "never.bias"]
        _, _, used_once, never = trained.split(len(once))
        # Bit for bit: neither momentum nor weight decay moved them.
        torch.testing.assert_close(used_once, once, rtol=0, atol=0)
        torch.testing.assert_close(never, at_start, rtol=0, atol=0)


def _unused_and_zeroed(rank: int) -> tuple[Tensor, Tensor]:
    model = Heads()
    strategy = fleet.DistributedStrategy(find_unused_parameters=True)
    model, optimizer = fleet.distribute(model, _decaying(model), strategy)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x, rank, step), y))
        optimizer.step()
    return weights(model), weights(model.never)


def test_zeroing_to_zeros_gives_no_gradient_to_a_parameter_that_never_had_one() -> None:
    # torch zeroes the gradients there are, and makes none: weight decay must not find one.
    ranks = run_ranks(_unused_and_zeroed, 2)
    assert_equal_on_all_ranks([trained for trained, _ in ranks])
    torch.testing.assert_close(ranks[0][1], weights(Heads().never), rtol=0, atol=0)


# --- models of many kinds -------------------------------------------------------------------------------------------


def _gan_nets() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return generator, discriminator


def _gan_rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(2 * step + rank, dtype=torch.float64)[0], batch(500 + 2 * step + rank, shape=(3,), dtype=torch.float64)[0]


def _losses_of_d(generator: nn.Module, discriminator: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    # Not detached: the discriminator's minimize must leave the generator alone by itself.
    return F.softplus(discriminator(generator(noise))).mean() + F.softplus(-discriminator(real)).mean()


def _gan(rank: int) -> dict[str, Any]:
    generator, discriminator = _gan_nets()
    merged = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    generator, g_optimizer = fleet.distribute(generator, sgd(generator))
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator), merged)
    due, touched = [], False
    for step in range(STEPS):
        real, noise = _gan_rows(rank, step)
        d_loss = _losses_of_d(generator, discriminator, real, noise)
        due.append(d_optimizer.minimize(d_loss).due)
        touched |= any(p.grad is not None for p in generator.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in discriminator.parameters()]
        g_optimizer.minimize(F.softplus(-discriminator(generator(noise))).mean())
        for p, was in zip(discriminator.parameters(), before, strict=True):
            touched |= (p.grad is None) != (was is None) or (was is not None and not torch.equal(p.grad, was))  # type: ignore[arg-type]
    return {"weights": torch.cat([weights(generator), weights(discriminator)]), "due": due, "touched": touched}


def test_two_pairs_of_a_gan_never_touch_each_other() -> None:
    ranks = run_ranks(_gan, 2)
    generator, discriminator = _gan_nets()
    g_optimizer, d_optimizer = sgd(generator), sgd(discriminator)
    kept: list[Tensor] = []
    for step in range(STEPS):
        (real0, noise0), (real1, noise1) = _gan_rows(0, step), _gan_rows(1, step)
        real, noise = torch.cat([real0, real1]), torch.cat([noise0, noise1])
        d_params, g_params = list(discriminator.parameters()), list(generator.parameters())
        grads = torch.autograd.grad(_losses_of_d(generator, discriminator, real, noise), d_params)
        kept = [a + b / 2 for a, b in zip(kept, grads, strict=True)] if kept else [g / 2 for g in grads]
        if step % 2:
            for p, g in zip(d_params, kept, strict=True):
                p.grad = g
            d_optimizer.step()
            kept = []
        for p, g in zip(
            g_params, torch.autograd.grad(F.softplus(-discriminator(generator(noise))).mean(), g_params), strict=True
        ):
            p.grad = g
        g_optimizer.step()
    reference = torch.cat([weights(generator), weights(discriminator)])
    assert_trained_alike([seen["weights"] for seen in ranks], reference)
    for seen in ranks:
        assert seen["due"] == [False, True] * (STEPS // 2)
        assert not seen["touched"]


def _bare_gan(rank: int) -> Tensor:
    generator, discriminator = _gan_nets()
    generator, g_optimizer = fleet.distribute(generator, sgd(generator))
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator))
    for step in range(STEPS):
        real, noise = _gan_rows(rank, step)
        discriminator.zero_grad()  # what the generator's backward left behind
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(generator(noise).detach())).mean().backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        generator.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
    return torch.cat([weights(generator), weights(discriminator)])


def test_a_gan_written_as_in_torchs_own_example_trains_as_in_one_process() -> None:
    # The DCGAN tutorial: bare backwards, and zero_grad() of the modules, before each half.
    ranks = run_ranks(_bare_gan, 2)
    generator, discriminator = _gan_nets()
    g_optimizer, d_optimizer = sgd(generator), sgd(discriminator)
    for step in range(STEPS):
        (real0, noise0), (real1, noise1) = _gan_rows(0, step), _gan_rows(1, step)
        real, noise = torch.cat([real0, real1]), torch.cat([noise0, noise1])
        discriminator.zero_grad()
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(generator(noise).detach())).mean().backward()
        d_optimizer.step()
        generator.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        g_optimizer.step()
    assert_trained_alike(ranks, torch.cat([weights(generator), weights(discriminator)]))


def _gan_bytes(rank: int) -> list[tuple[int, int]]:
    generator, discriminator = _gan_nets()
    strategy = fleet.DistributedStrategy(desync_check_steps=0)
    generator, g_optimizer = fleet.distribute(generator, sgd(generator), strategy)
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator), strategy)
    sent = []
    for step in range(3):
        real, noise = _gan_rows(rank, step)
        d_report = d_optimizer.minimize(_losses_of_d(generator, discriminator, real, noise))
        g_report = g_optimizer.minimize(F.softplus(-discriminator(generator(noise))).mean())
        sent.append((d_report.bytes_sent, g_report.bytes_sent))
    return sent


def test_each_pair_reports_the_bytes_it_sent_itself() -> None:
    generator, discriminator = _gan_nets()
    expected = tuple(sum(p.nbytes for p in net.parameters()) + 4 * ALARMS for net in (discriminator, generator))
    for sent in run_ranks(_gan_bytes, 2):
        assert sent[1:] == [expected, expected]  # the first step also compares the ranks' batches


def _channels_last(rank: int) -> tuple[Tensor, list[bool]]:
    model = cnn().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model, optimizer = fleet.distribute(model, sgd(model))
    kept = []
    for step in range(STEPS):
        x, y = _images(rank, step)
        optimizer.backward(F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y))
        kept += [p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters()]
        kept.append(model[3].weight.grad.is_contiguous(memory_format=torch.channels_last))  # type: ignore[union-attr, operator]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), kept


def test_a_channels_last_model_keeps_its_strides_in_the_gradients() -> None:
    ours = run_ranks(_channels_last, 2)
    assert_trained_alike([trained for trained, _ in ours], run_ranks(_ddp, 2)[0])
    assert all(all(kept) for _, kept in ours)


def _compiled(rank: int, amp: bool) -> tuple[Tensor, bool]:
    quiet_about_speed()
    bare = net() if not amp else mlp()
    model: nn.Module = torch.compile(bare, backend="eager")  # type: ignore[assignment]
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x.to(bare[0].weight.dtype)), y))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    model.load_state_dict({f"_orig_mod.{name}": tensor for name, tensor in state.items()})
    return weights(model), list(state) == list(bare.state_dict())


def _uncompiled_amp(rank: int) -> Tensor:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x.float()), y))
    return weights(model)


@pytest.mark.parametrize("amp", [False, True])
def test_a_model_compiled_before_distribute_trains_as_uncompiled(amp: bool) -> None:
    ranks = run_ranks(_compiled, 2, amp)
    assert all(keys_are_plain for _, keys_are_plain in ranks)
    assert_trained_alike([trained for trained, _ in ranks], run_ranks(_uncompiled_amp, 2)[0] if amp else plain_loop())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def _tied(rank: int) -> tuple[Tensor, bool]:
    model = Tied()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model), model.leave.weight is model.enter.weight


def test_tied_parameters_stay_tied_and_count_once() -> None:
    ranks = run_ranks(_tied, 2)
    assert all(still_tied for _, still_tied in ranks)
    assert_trained_alike([trained for trained, _ in ranks], plain_loop(Tied))


class Mixed(nn.Module):
    """Two types, a parameter that is one number, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.narrow(x.float())).double()) * self.temperature + self.empty.sum().double()


def _mixed(rank: int) -> list[Tensor]:
    model = Mixed()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return [p.detach() for p in model.parameters()]


def test_parameters_of_two_types_and_of_one_number_or_none_train_together() -> None:
    ranks = run_ranks(_mixed, 2)
    model = Mixed()
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(ranks)
    for ours, reference in zip(ranks[0], model.parameters(), strict=True):
        assert ours.dtype == reference.dtype
        torch.testing.assert_close(ours, reference.detach(), rtol=1e-6, atol=1e-6)  # float32 is in the path of all of them


def _half_frozen() -> nn.Sequential:
    model = net()
    model[2].requires_grad_(False)
    return model


def _frozen(rank: int) -> tuple[Tensor, bool]:
    model = _half_frozen()
    if rank == 1:
        with torch.no_grad():
            model[2].weight.fill_(7.0)  # type: ignore[operator]
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model), model[2].weight.grad is None


def test_frozen_parameters_come_from_rank_0_and_do_not_train() -> None:
    ranks = run_ranks(_frozen, 2)
    assert all(without_gradient for _, without_gradient in ranks)
    assert_trained_alike([trained for trained, _ in ranks], plain_loop(_half_frozen))


def _tiny_bert() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library says about itself is not ours to judge
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)


def _tokens(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 40, (4, 10), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 3, (4,), generator=generator),
    }


def _hugging_face(rank: int) -> dict[str, Any]:
    given = _tiny_bert().double()
    keys = list(given.state_dict())
    cls = type(given)
    model, optimizer = fleet.distribute(given, torch.optim.AdamW(given.parameters(), lr=1e-3))
    for step in range(STEPS):
        optimizer.minimize(model(**_tokens(rank, step)).loss)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        # The library itself writes on rank 0 alone.
        saved = rank > 0 or torch.equal(flat_state(cls.from_pretrained(folder)), flat_state(model))
    return {
        "weights": weights(model),
        "the same object": model is given and isinstance(model, cls) and type(model) is cls,
        "keys": list(model.state_dict()) == keys,
        "saved": saved,
    }


def test_a_hugging_face_model_trains_and_stays_itself() -> None:
    ranks = run_ranks(_hugging_face, 2)
    model = _tiny_bert().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        first, second = _tokens(0, step), _tokens(1, step)
        model(**{name: torch.cat([first[name], second[name]]) for name in first}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for seen in ranks:
        assert seen["the same object"]
        assert seen["keys"]
        assert seen["saved"]
    assert_equal_on_all_ranks([seen["weights"] for seen in ranks])
    # Adam divides by the root of a tiny square: rounding in a near-zero gradient grows, up to about lr * 1e-12 / 1e-8.
    torch.testing.assert_close(ranks[0]["weights"], weights(model), rtol=0, atol=1e-9)


def _hugging_face_amp(rank: int) -> dict[str, Any]:
    import inspect

    quiet_about_speed()
    model = _tiny_bert()
    with torch.no_grad():
        plain = model(**_tokens(0, 77))
    signature = str(inspect.signature(model.forward))
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy)
    with torch.no_grad():
        first = model(**_tokens(0, 77))
    for step in range(2):
        optimizer.minimize(model(**_tokens(rank, step)).loss)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return {
        "type": type(first) is type(plain),
        "keys": list(first.keys()) == list(plain.keys()),
        "dtype": str(first.logits.dtype),
        "attribute and key": torch.equal(first.logits, first["logits"]),
        "error": float((first.logits - plain.logits).abs().max()),
        "signature": str(inspect.signature(model.forward)) == signature,
    }


def test_a_hugging_face_model_under_amp_returns_its_own_output_type_in_float32() -> None:
    for seen in run_ranks(_hugging_face_amp, 2):
        assert seen["type"]
        assert seen["keys"]
        assert seen["dtype"] == "torch.float32"
        assert seen["attribute and key"]
        assert 0 < seen["error"] < 0.05  # 8 bits of mantissa, logits of size 1: it did compute in bfloat16


def test_the_signature_of_forward_survives_amp() -> None:
    # Hugging Face's generate and Trainer read it to decide which arguments the model takes.
    assert all(seen["signature"] for seen in run_ranks(_hugging_face_amp, 2))


# --- state, flush, report -------------------------------------------------------------------------------------------


def _adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _saved_and_resumed(rank: int) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]:
    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            x, y = rows_of(rank, step)
            optimizer.minimize(F.cross_entropy(model(x), y))

    first = net()
    first, optimizer = fleet.distribute(first, _adam(first))
    train(first, optimizer, range(3))
    model_state, optimizer_state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(first, optimizer, range(3, STEPS))

    second = net()
    inner = _adam(second)
    scheduler = StepLR(inner, step_size=1, gamma=1.0)
    second, resumed = fleet.distribute(second, inner)
    second.load_state_dict(model_state)
    resumed.load_state_dict(copy.deepcopy(optimizer_state))  # torch takes the tensors themselves, and trains them
    for step in range(3, STEPS):
        train(second, resumed, range(step, step + 1))
        scheduler.step()
    return weights(first), weights(second), model_state, optimizer_state


def test_optimizer_state_is_in_plain_torch_form_and_resumes_anywhere() -> None:
    ranks = run_ranks(_saved_and_resumed, 2)
    alone = net()
    optimizer = _adam(alone)
    alone.load_state_dict(ranks[0][2])
    optimizer.load_state_dict(ranks[0][3])  # saved by ours on two ranks, read by torch in one process
    for step in range(3, STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for through, resumed, _, _ in ranks:
        torch.testing.assert_close(resumed, through, rtol=0, atol=0)
    # 1e-9 and not 1e-12: Adam divides a gradient by its own size, and so enlarges the rounding of a tiny one.
    torch.testing.assert_close(ranks[0][0], weights(alone), rtol=0, atol=1e-9)
    assert set(ranks[0][3]) == {"state", "param_groups"}


def _flushed(rank: int, spelling: str) -> tuple[Tensor, list[tuple[bool, bool]]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(7):  # one full window, then three of four
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        if spelling == "bare":
            loss.backward()
            report = optimizer.step()
            optimizer.zero_grad()
        else:
            report = optimizer.minimize(loss)
        seen.append((report.due, report.updated))
    for _ in range(2):  # a second flush finds nothing to do
        report = optimizer.flush()
        seen.append((report.due, report.updated))
    x, y = rows_of(rank, 7)
    seen.append((optimizer.due, optimizer.minimize(F.cross_entropy(model(x), y)).due))  # the next window starts at its beginning
    return weights(model), seen


@pytest.mark.parametrize("spelling", ["minimize", "bare"])
def test_flush_closes_a_window_with_the_mean_of_what_it_has(spelling: str) -> None:
    ranks = run_ranks(_flushed, 2, spelling)
    model = net()
    optimizer = sgd(model)
    for window in (range(4), range(4, 7)):
        losses = [F.cross_entropy(model(x), y) for x, y in map(joined_rows, window)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike([trained for trained, _ in ranks], weights(model))
    no, yes = (False, False), (True, True)
    for _, seen in ranks:
        assert seen == [no, no, no, yes, no, no, no, yes, no, no]


def _large_gradients(rank: int, loop: str) -> Tensor:
    """A gradient of a mebibyte is made true while it is copied, once its window is about to close: not by an earlier factor."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 2**14, dtype=torch.float64)
    merged = 1 if loop == "a bare backward after ours" else 3
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": merged})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    losses = (model(rows_of(rank, step)[0]).square().mean() for step in range(2))
    optimizer.minimize(next(losses))
    if loop == "flushed after one of three":
        optimizer.flush()
        optimizer.minimize(next(losses))
        optimizer.flush()
    else:
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("loop", ["a bare backward after ours", "flushed after one of three"])
def test_large_gradients_are_true_ones_however_a_window_closes(loop: str) -> None:
    ranks = run_ranks(_large_gradients, 2, loop)
    torch.manual_seed(0)
    model = nn.Linear(8, 2**14, dtype=torch.float64)
    optimizer = sgd(model)
    for step in range(2):
        model(joined_rows(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(ranks, weights(model))


def _reports(rank: int) -> list[tuple[bool, float, Report]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, desync_check_steps=0)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(4):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        due_before = optimizer.due
        report = optimizer.minimize(loss)
        seen.append((due_before, loss.item(), report))
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_a_report_says_what_the_micro_step_did(size: int) -> None:
    parameter_bytes = sum(p.nbytes for p in net().parameters())
    for seen in run_ranks(_reports, size):
        due_before, losses, reports = zip(*seen, strict=True)
        assert due_before == tuple(r.due for r in reports) == (False, True, False, True)
        assert [r.updated for r in reports] == [False, True, False, True]
        assert not any(r.skipped for r in reports)
        assert all(r.loss_scale == 1.0 and r.period is None for r in reports)
        assert [r.grad_norm is not None and r.grad_norm > 0 for r in reports] == [False, True, False, True]
        assert reports[1].loss == pytest.approx((losses[0] + losses[1]) / 2, abs=1e-12)
        assert reports[3].loss == pytest.approx((losses[2] + losses[3]) / 2, abs=1e-12)
        # Nothing travels inside a window. In the second (the first also compares the ranks' batches) the gradients do,
        # and with them one float32 for each alarm.
        assert reports[0].bytes_sent == reports[2].bytes_sent == 0
        assert reports[3].bytes_sent == round(2 * (size - 1) / size * (parameter_bytes + 4 * ALARMS))


def _due(rank: int) -> list[tuple[bool, bool, bool]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(6):
        before = optimizer.due
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        after = optimizer.due  # `if optimizer.due: clip` stands here
        seen.append((before, after, optimizer.step().due))
        optimizer.zero_grad()
    return seen


def test_due_says_the_same_before_and_after_the_backward_it_speaks_of() -> None:
    no, yes = (False,) * 3, (True,) * 3
    assert run_ranks(_due, 2) == [[no, no, yes, no, no, yes]] * 2


def _overflowed(rank: int) -> tuple[list[tuple[bool, bool, bool, float]], list[Tensor]]:
    quiet_about_speed()
    model = mlp()
    settings = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}
    strategy = fleet.DistributedStrategy(amp=True, amp_configs=settings)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    reports, states = [], []
    for step in range(3):
        x, y = batch(step * 2 + rank)
        loss = F.cross_entropy(model(x), y)
        if step == 1 and rank == 1:
            loss = loss * float("inf")  # on one rank alone; all must skip
        report = optimizer.minimize(loss)
        reports.append((report.due, report.updated, report.skipped, report.loss_scale))
        states.append(weights(model).clone())
    return reports, states


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    ranks = run_ranks(_overflowed, 2)
    for reports, states in ranks:
        assert reports == [(True, True, False, 1024.0), (True, False, True, 1024.0), (True, True, False, 512.0)]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
        assert not torch.equal(states[2], states[1])
    assert_equal_on_all_ranks([states for _, states in ranks])


def _first_update_skipped(rank: int, when: str) -> list[bool]:
    quiet_about_speed()
    model = mlp()
    inner = sgd(model)
    scheduler = StepLR(inner, step_size=1) if when == "before" else None
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16"})
    model, optimizer = fleet.distribute(model, inner, strategy)
    scheduler = scheduler or StepLR(optimizer, step_size=1)
    skipped = []
    for step in range(2):
        x, y = batch(step * 2 + rank)
        report = optimizer.minimize(F.cross_entropy(model(x), y) * (float("inf") if step == 0 else 1.0))
        skipped.append(report.skipped)
        scheduler.step()  # every due micro-step counts, skipped ones too
    return skipped


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_is_not_warned_about_when_the_first_update_is_skipped(when: str) -> None:
    assert run_ranks(_first_update_skipped, 2, when) == [[True, False]] * 2


def _discarded(rank: int) -> Tensor:
    model = net()
    model, first = fleet.distribute(model, sgd(model))
    scheduler = StepLR(first, step_size=1)
    x, y = rows_of(rank, 99)
    first.backward(F.cross_entropy(model(x), y))
    first.zero_grad()
    del first, scheduler
    model, second = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        second.minimize(F.cross_entropy(model(x), y))
    return weights(model)


def test_a_discarded_pair_gives_its_parameters_free() -> None:
    assert_trained_alike(run_ranks(_discarded, 2), plain_loop())


def _kept_alive(rank: int) -> bool:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    x, y = rows_of(rank, 0)
    large = torch.zeros(1000)  # a loaded checkpoint, say: a local of the training function, dropped later
    reference = weakref.ref(large)
    optimizer.minimize(F.cross_entropy(model(x), y))
    del large
    gc.collect()
    return reference() is not None


def test_nothing_of_the_callers_locals_is_kept_alive_by_the_first_forward() -> None:
    assert run_ranks(_kept_alive, 2) == [False, False]


def _two_calls(rank: int, order: str) -> Tensor:
    model = net()
    if rank == 1:
        with torch.no_grad():
            model[0].weight.fill_(7.0)  # type: ignore[operator]
    other = net()  # a second model that waits: parameters decide who belongs to whom
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    fleet.distributed_model(other)
    if order == "model first":
        same = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(sgd(model), strategy)
    else:
        optimizer = fleet.distributed_optimizer(sgd(model), strategy)
        same = fleet.distributed_model(model)
    assert same is model
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_the_two_call_spelling_works_in_both_orders(order: str) -> None:
    assert_trained_alike(run_ranks(_two_calls, 2, order), _plain_merged(3))

"""Guards optimizers made after `distribute`: they replace the given one, or are refused with the line to write."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.ddp_loops import STEPS, assert_as_under_ddp, loss_of, make_pair, rows, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, mlp


def _new_optimizers(rank: int, api: str) -> Tensor:
    """One for each phase; the first is collected at another moment on each rank."""
    inner = mlp(torch.float64)
    model: Any = inner
    optimizer: Any = sgd(inner)
    if api == "ours":
        model, optimizer = fleet.distribute(inner, optimizer, small_buckets())
    else:
        model = DistributedDataParallel(inner)
    for step in range(3 * STEPS):
        if step % STEPS == 2:
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1 / (step + 1), momentum=0.9)
        if step == 3 + 2 * rank:
            gc.collect()
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step % STEPS > 3:
            loss_of(model, rank, 50 + step).backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 0.2)
        optimizer.step()
    return weights(inner)


def test_a_new_optimizer_for_each_phase_trains_as_under_ddp_whenever_the_old_one_is_collected() -> None:
    mine, theirs = run_ranks(_new_optimizers, 2, "ours"), run_ranks(_new_optimizers, 2, "ddp")
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)


def _two_over_the_same(model: nn.Module, optimizer: Any, rank: int) -> None:
    """The one that was given, and one beside it that steps before it, after it, or alone; gradients are zeroed now and then."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    other = torch.optim.Adam(inner.parameters(), lr=0.01)  # type: ignore[union-attr]
    local = fleet.no_sync if inner is model else model.no_sync  # type: ignore[union-attr]
    for step in range(10):
        if step % 4:
            (other if step % 2 else model).zero_grad(set_to_none=step % 3 > 0)
        with local() if step in (5, 6) else contextlib.nullcontext():  # type: ignore[operator]
            loss_of(model, rank, step).backward()
        if step in (5, 6):
            loss_of(model, rank, 20 + step).backward()
        for stepped in ([other, optimizer], [optimizer, other], [other], [optimizer])[step % 4]:
            stepped.step()


def test_a_second_optimizer_over_the_same_parameters_steps_before_or_after_the_given_one() -> None:
    assert_as_under_ddp(_two_over_the_same)


def _by_parts(model: nn.Module, optimizer: Any, rank: int) -> None:
    """An optimizer for each layer, and backwards by the returned one's backward() where there is one."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parts = [torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in inner.parameters()]  # type: ignore[union-attr]
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        optimizer.backward(loss) if hasattr(optimizer, "backward") and step % 2 else loss.backward()
        for part in parts:
            part.step()
            part.zero_grad()


def test_an_optimizer_for_each_parameter_takes_the_place_of_the_one_that_was_given() -> None:
    assert_as_under_ddp(_by_parts)


def _new_optimizer_with_statistics(rank: int, api: str) -> tuple[Tensor, int]:
    """Of a ModuleList that only distribute has seen."""
    first, second = cnn(), cnn()
    given = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    returned: Any = None
    if api == "ours":
        _, returned = fleet.distribute(nn.ModuleList([first, second]), given, small_buckets())
    del given
    held = [returned] if rank == 0 else []
    del returned
    gc.collect()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    ranks = [rank] if api == "ours" else [0, 1]
    for step in range(STEPS):
        optimizer.zero_grad()
        for r in ranks:
            x, y = batch(step * 2 + r, shape=(1, 6, 6))
            (F.cross_entropy(second.eval()(x), y) + F.cross_entropy(first.eval()(x), y)).div(len(ranks)).backward()
        optimizer.step()
    return torch.cat([weights(first), weights(second)]), held[0].pipeline.index if held and held[0] is not None else 0


def test_any_module_of_a_model_keeps_its_pair_alive_and_updates_of_others_are_counted() -> None:
    mine, alone = run_ranks(_new_optimizer_with_statistics, 2, "ours"), run_ranks(_new_optimizer_with_statistics, 1, "alone")
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0][0], alone[0][0], rtol=1e-5, atol=1e-6)
    assert mine[0][1] == STEPS - 1, "the last one is counted with the next backward"


PAST_PARTS: dict[str, dict[str, Any]] = {
    "lars": {"lars": True},
    "dgc": {"dgc": True},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "clip_norm": {"clip_norm": True},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "on_nan_inf": {"on_nan_inf": "skip"},
}


def _stepped_past(rank: int) -> list[str]:
    told = []
    for parts in PAST_PARTS.values():
        model = mlp(torch.float64)
        given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, _ = fleet.distribute(model, given, small_buckets(**parts))
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, rank, 0).backward()
        told.append(raised(other.step))
        before = weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # a merge window that was begun goes
            model, other = fleet.distribute(model, other, small_buckets())  # the line that it says
        loss_of(model, rank, 1).backward()
        other.step()
        assert not torch.equal(before, weights(model))
    model = mlp(torch.float64)
    fleet.distribute(model, sgd(model), small_buckets(gradient_merge=True, bf16_allreduce=True))
    loss_of(model, rank, 0).backward()
    told.append(raised(sgd(model).step))
    return told


def test_a_step_of_another_optimizer_that_would_leave_a_part_out_is_refused_with_the_line_to_write() -> None:
    for told in run_ranks(_stepped_past, 2):
        for message, part in zip(told, PAST_PARTS, strict=False):
            assert message.startswith("ConfigError: the SGD that is stepped here was not given to fleet.distribute(...)"), message
            assert f"strategy.{part}" in message and "model, optimizer = fleet.distribute(model, optimizer, strategy)" in message
        assert told[-1] == "nothing raised"


def _new_heads(rank: int) -> list[str]:
    told = []
    for of_all in (True, False):
        model, optimizer = make_pair(find_unused_parameters=True)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        model[4] = nn.Linear(16, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD((model if of_all else model[4]).parameters(), lr=0.1)
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        told.append(raised(optimizer.step))
    hooked, _ = make_pair()
    by_hook = torch.optim.SGD(hooked.parameters(), lr=0.1)
    hooked[0].weight.register_post_accumulate_grad_hook(lambda _: by_hook.step())
    told.append(raised(lambda: loss_of(hooked, rank, 0).backward()))
    params = _only_parameters()
    gc.collect()
    told.append(raised(lambda: (params[0].sum() * rank).backward()))
    lone = nn.ParameterList(params)
    lone, optimizer = fleet.distribute(lone, torch.optim.SGD(lone.parameters(), lr=0.1), small_buckets())
    sum(p.sum() for p in lone).backward()  # type: ignore[union-attr]
    told.append(raised(optimizer.step))
    return told


def _only_parameters() -> list[nn.Parameter]:
    model, _ = make_pair()
    return list(model.parameters())


def test_a_new_last_layer_a_step_inside_backward_and_a_discarded_model_are_told() -> None:
    for whole, head, hooked, discarded, together in run_ranks(_new_heads, 2):
        for message in (whole, head):
            assert message.startswith("ConfigError: the SGD that is stepped here was not given"), message
            assert "trains `4.weight`" in message and "fleet.distribute(model, optimizer, strategy)" in message
        assert hooked.startswith("ConfigError: this SGD is stepped while a backward is going on"), hooked
        assert discarded.startswith("ConfigError: the pair that fleet.distribute(...) made of these parameters was discarded")
        assert together == "nothing raised"


def _collected_and_copied(rank: int) -> tuple[list[bool], bool, list[str], bool]:
    model, optimizer = make_pair()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    keys = list(model.state_dict())
    copied, written = copy.deepcopy(model), io.BytesIO()
    torch.save(model, written)
    plain = [name for module in copied.modules() for name in vars(module) if "fleetx" in name]
    F.cross_entropy(copied(rows(rank, 1)[0]), rows(rank, 1)[1]).backward()  # of no pair
    watched = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer.pipeline)]
    del optimizer
    gc.collect()
    kept = watched[2]() is not None
    del model
    gc.collect()
    is_plain = keys == list(mlp().state_dict()) and b"fleetx" not in written.getvalue()
    return [found() is None for found in watched], kept, plain, is_plain


def test_a_pair_is_collected_with_its_model_and_copies_of_the_model_have_none() -> None:
    for gone, kept, in_copy, is_plain in run_ranks(_collected_and_copied, 2):
        assert all(gone) and kept and in_copy == [] and is_plain

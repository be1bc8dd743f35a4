"""What recompute is for: of a unit only its inputs are kept until backward. Counted in bytes of live storage, exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.recompute_runs import distribute

ROWS, HIDDEN, BLOCKS, LAYERS = 512, 32, 8, 6
ACTIVATION = ROWS * HIDDEN * 4
"""Bytes of one. A layer is a linear map and a tanh, which keeps its result: the next layer's input, so one for each layer."""


class LiveBytes(TorchDispatchMode):
    """Every storage that an operation makes, and whether it lives: saved tensors are no Python objects, so gc sees none."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                ref = StorageWeakRef(tensor.untyped_storage())
                self._seen.setdefault(ref.cdata, (ref, tensor.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self._seen = {key: found for key, found in self._seen.items() if not found[0].expired()}
        return sum(nbytes for _, nbytes in self._seen.values())


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [[part for _ in range(LAYERS) for part in (nn.Linear(HIDDEN, HIDDEN), nn.Tanh())] for _ in range(BLOCKS)]
    return nn.Sequential(nn.Sequential(*(nn.Sequential(*block) for block in layers)), nn.Linear(HIDDEN, 1))


@contextmanager
def without_gc() -> Iterator[None]:
    """What a cycle of references holds stays then, and is counted."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measured(recompute: list[str] | None) -> tuple[int, int, int]:
    """Bytes kept for backward; the most at any time in forward and backward; and what is left afterwards, without gradients."""
    model, optimizer = distribute(net(), recompute)
    x = torch.randn(ROWS, HIDDEN)
    optimizer.minimize(model(x).mean())  # buckets and momentum are made now
    with without_gc(), LiveBytes() as bytes_:
        loss = model(x).mean()
        saved = bytes_.live()
        loss.backward()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        del loss
        return saved, bytes_.peak, bytes_.live() - gradients


def test_only_the_inputs_of_units_are_kept_for_backward(alone: None) -> None:
    scalar = 4  # the loss
    stored, stored_peak, stored_left = measured(None)
    kept, kept_peak, kept_left = measured(["0.*"])
    assert stored == BLOCKS * LAYERS * ACTIVATION + scalar
    assert kept == BLOCKS * ACTIVATION + scalar  # each block's output: the input of the next, and of the head
    # In backward one block at a time has its activations again; all gradients are three activations, and there are temporaries.
    assert kept_peak - kept < 2 * LAYERS * ACTIVATION < stored_peak - kept_peak
    assert stored_left <= 0 and kept_left <= 0


def test_a_forward_that_is_never_used_leaves_nothing(alone: None) -> None:
    model, _ = distribute(net(), [])
    x = torch.randn(ROWS, HIDDEN)
    with without_gc(), LiveBytes() as bytes_:
        loss = model(x).mean()
        assert bytes_.live() > BLOCKS * ACTIVATION
        del loss
        assert bytes_.live() == 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_second_run_that_fails_leaves_nothing_either(nested: bool, alone: None) -> None:
    model, optimizer = distribute(net(), ["0"] if nested else ["0.*"])
    x = torch.randn(ROWS, HIDDEN)
    with without_gc(), LiveBytes() as bytes_:
        loss = model(x).mean()
        x.add_(1)
        with pytest.raises(Exception, match=r"`0(\.0)?` was changed in place"):
            optimizer.minimize(loss)
        del loss
        gc.collect()  # the traceback of the error held it
        assert bytes_.live() <= sum(p.nbytes for p in model.parameters())

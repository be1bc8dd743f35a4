"""A look at the first forward: is each rank fed its own data, and was the model compiled behind our back?"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from ...dist.comm import Comm
from ...errors import ConfigError, warn_user
from .. import dry_run_flag
from ..plain_copy import keep_copies_plain, left_out
from .shuffled_loaders import advice_on, shuffled_loaders

COMPILE_FIRST = (
    "the model was compiled after fleet.distribute(...). Compile first: "
    "model = torch.compile(model); model, optimizer = fleet.distribute(model, optimizer, strategy)"
)


def digest(value: Any) -> str | None:
    """A fingerprint of all tensors in a (nested) value, or None when it holds none."""
    hasher = hashlib.sha256()
    found = _feed(hasher, value)
    return hasher.hexdigest()[:16] if found else None


def _feed(hasher: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_quantized:
            return False
        data = (
            value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else torch.zeros(0, dtype=torch.uint8)
        )
        hasher.update(str((value.shape, value.dtype)).encode() + data.numpy().tobytes())
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any([_feed(hasher, item) for item in value])
    return False


@final
class FirstLook:
    """Hooks the model's first training forward. Says nothing, and costs nothing, afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled_before = is_compiled(model)
        self._digest: str | None = None
        if "torch._dynamo" in sys.modules:  # a model that is compiled has loaded it; to load it here would take seconds
            _hide_from_compiler()
        self._handle = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        keep_copies_plain(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_at_nothing, ()  # a copy that a class's own `__deepcopy__` makes has the hook; there it says nothing

    @left_out
    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._model or dry_run_flag.is_on():  # in a copy of the model it is another one
            return
        if not self._compiled_before and _called_from_compiled(module):
            raise ConfigError(COMPILE_FIRST)
        if module.training and self._digest is None and torch.is_grad_enabled():
            with contextlib.suppress(RuntimeError):  # tensors without data (torch.func, fake tensors) tell nothing
                self._digest = digest([args, kwargs])

    def give_up(self) -> None:
        self._handle.remove()

    def finish(self, comm: Comm, *, loss: Tensor | None, weighted: bool) -> None:
        """Compare the ranks once, at the first update. Every rank is here: it is about to reduce."""
        self._handle.remove()
        if not self._compiled_before and is_compiled(self._model):
            raise ConfigError(COMPILE_FIRST)
        if comm.size == 1:
            return
        seen = self._digest or (None if loss is None else float(loss.detach()).hex())
        loaders = shuffled_loaders(comm.size)
        ranks = comm.gather_json({"batch": seen, "weighted": weighted} | ({"loaders": loaders} if loaders else {}))
        if len({rank["weighted"] for rank in ranks}) > 1:
            having = [i for i, rank in enumerate(ranks) if rank["weighted"]]
            raise ConfigError(f"only ranks {having} pass weight= to minimize/backward; every rank must, or none.")
        if comm.rank != 0:
            return
        advice = advice_on([rank.get("loaders", []) for rank in ranks])
        if seen is not None and len({rank["batch"] for rank in ranks}) == 1:
            advice = (
                f"all {comm.size} ranks saw the same first batch, so they do the same work. Give each its share of the data: "
                "DataLoader(data, batch_size, sampler=fleet.sampler(data)). A batch drawn at random needs another seed on "
                "each rank: torch.manual_seed(seed + fleet.worker_index()) after the model is made."
            )
        if advice is not None:
            warn_user(advice)


@functools.cache
def _hide_from_compiler() -> None:
    """The whole hook, or a compiled model would break in two at it."""
    FirstLook._on_forward = torch.compiler.disable(FirstLook._on_forward)  # type: ignore[method-assign]


def _look_at_nothing() -> FirstLook:
    look = object.__new__(FirstLook)
    look._model = nn.Module()
    return look


def is_compiled(model: nn.Module) -> bool:
    return type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None


def _called_from_compiled(model: nn.Module) -> bool:
    """Whether a torch.compile wrapper of this very model is on the call stack."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = sys._getframe(1) if dynamo is not None else None
    while dynamo is not None and frame is not None:
        # Only of torch's own frame: reading a user's f_locals would keep all they hold alive.
        if frame.f_code is dynamo.OptimizedModule.__call__.__code__:
            return frame.f_locals["self"]._orig_mod is model
        frame = frame.f_back
    return False

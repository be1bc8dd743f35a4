"""Estimate the memory of training without running it: arithmetic, and a step on tensors that have shapes and no data.

    weights, gradients, optimizer's state    counted; the state by one update of a small matrix by the same optimizer
    what a batch needs                       the most bytes in use in forward and backward, of two batches: a line

Floating numbers are fakes, which take no memory; integers (tokens, labels, masks) are real, so that a model may select by them.
Dropout and attention save what the kernels of a GPU save, and amp casts what it casts there. Workspaces inside kernels, and what
an allocator holds without using it, are not counted.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..engine.dry_run import own_loss
from ..engine.modules.nested_tensors import map_tensors
from ..engine.modules.patching import patched
from ..engine.setup.bind import LossFn
from ..errors import ConfigError, first_line
from ..recompute.batches import rows_in, rows_of
from ..recompute.memory_probe import Counter
from ..recompute.units import chosen_units

PROBE_SIDE = 64
"""Side of the matrix by which the optimizer's state is found."""
FEWEST_ROWS = 32
"""Rows of the smaller of the two batches: fakes of many rows take no longer than of few."""
PLANS = (("float32", False, False), ("amp", True, False), ("recompute", False, True), ("amp + recompute", True, True))
IN_FULL = frozenset((F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, torch.log_softmax))
"""Functions that autocast computes in float32 on a GPU, and not on a CPU."""


@final
@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Hold the memory of one plan: a line in the number of rows, beyond what is kept from step to step."""

    name: str
    bytes_of_no_row: float
    bytes_per_row: float

    def at(self, rows: int) -> int:
        return max(0, int(self.bytes_of_no_row + rows * self.bytes_per_row))

    def most_rows(self, room_bytes: float) -> int:
        """Return the most rows that fit into so many bytes."""
        room = room_bytes - self.bytes_of_no_row
        return max(0, int(room / self.bytes_per_row)) if self.bytes_per_row > 0 else 0


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    parameters: int
    weights: int
    """Bytes of parameters and buffers."""
    gradients: int
    state: int
    """Bytes of the optimizer's state."""
    rows: int
    """Rows of the sample."""
    plans: tuple[PlanMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Return the bytes that are in use whatever the batch."""
        return self.weights + self.gradients + self.state


def estimated(model: nn.Module, optimizer: Optimizer, sample: Any, loss_fn: LossFn | None = None) -> Estimate:
    """Estimate; the model's tensors become fakes, so that it can be used for nothing else."""
    counts = rows_in(sample)
    if len(counts) != 1 or 0 in counts:
        raise ConfigError(
            "--estimate: the tensors of the sample have different numbers of rows, so that no other batch can be made of it. "
            "Return a sample whose tensors all have one row for each sample."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    made = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)  # within `without_data`
    fakes = made or FakeTensorMode(allow_non_fake_inputs=True)
    with_fakes(model, fakes)
    held = [*model.parameters(), *model.buffers()]
    plans, notes = [], []
    for name, amp, again in PLANS:
        try:
            plans.append(_plan(model, sample, loss_fn or own_loss, fakes, max(counts), name, amp, again))
        except ConfigError as error:
            notes.append(f"{name}: {error}")
        except Exception as error:
            if not plans and name == "float32":
                raise ConfigError(_cannot(error)) from error
            notes.append(f"{name}: {type(error).__name__}: {first_line(error)}")
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        weights=sum(t.numel() * t.element_size() for t in held),
        gradients=gradients,
        state=int(state_share(optimizer) * gradients),
        rows=max(counts),
        plans=tuple(plans),
        notes=tuple(notes),
    )


def _cannot(error: Exception) -> str:
    return (
        f"--estimate: the model cannot be run on tensors without data: {type(error).__name__}: {first_line(error)}. Where its "
        "forward reads floating numbers (item(), if x > 0), measure instead: leave --estimate out."
    )


def _plan(
    model: nn.Module, sample: Any, loss_fn: LossFn, fakes: FakeTensorMode, rows: int, name: str, amp: bool, again: bool
) -> PlanMemory:
    """Run two batches, and draw the line through their peaks."""
    units = chosen_units(model, []) if again else {}
    few, many = max(rows, FEWEST_ROWS), 2 * max(rows, FEWEST_ROWS)  # what a row adds is seen where rows are most of the memory
    peaks = [_peak(model, rows_of(sample, count), loss_fn, fakes, units, amp=amp) for count in (few, many)]
    per_row = (peaks[1] - peaks[0]) / (many - few)
    return PlanMemory(name, peaks[0] - few * per_row, per_row)


def _peak(
    model: nn.Module, sample: Any, loss_fn: LossFn, fakes: FakeTensorMode, units: Mapping[str, nn.Module], *, amp: bool
) -> int:
    """Return the most bytes in use in a forward and backward beyond weights and gradients."""
    batch = map_tensors(lambda tensor: _fake(tensor, fakes), sample)
    for param in model.parameters():
        param.grad = fakes.from_tensor(torch.empty(())).new_empty(param.shape) if param.requires_grad else None
    counter = Counter(counts_fakes=True)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    counter.add_known([*model.parameters(), *model.buffers(), *gradients])
    held = counter.now
    with patched((unit, _computed_again) for unit in units.values()), counter, AsOnGpu():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = loss_fn(model, batch)
        torch.autograd.backward(loss)
    return counter.peak - held


def _computed_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with AsOnGpu():  # backward has its own stack of modes
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


# --- tensors without data ---------------------------------------------------------------------------------------------------


def _fake(tensor: Tensor, fakes: FakeTensorMode) -> Tensor:
    """Return a fake of a floating tensor; others are returned as they are."""
    if isinstance(tensor, FakeTensor) or not tensor.is_floating_point():
        return tensor
    return fakes.from_tensor(tensor.detach())


def with_fakes(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Put fakes in the place of a model's floating parameters and buffers; shared ones stay shared."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                made = known.setdefault(id(param), nn.Parameter(_fake(param, fakes), requires_grad=param.requires_grad))
                module._parameters[name] = made  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), _fake(buffer, fakes))


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Make models inside without data: their weights take neither memory nor time."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def state_share(optimizer: Optimizer) -> float:
    """Return the optimizer's state in bytes for each byte of trained parameters, from one update of a small matrix."""
    matrix = nn.Parameter(torch.ones(PROBE_SIDE, PROBE_SIDE))
    matrix.grad = torch.ones_like(matrix)
    takes = inspect.signature(type(optimizer)).parameters
    group = {name: value for name, value in optimizer.param_groups[0].items() if name in takes and name != "params"}
    try:
        probe = type(optimizer)([matrix], **group)
        probe.step()
    except Exception as error:
        raise ConfigError(
            f"--estimate: the state of {type(optimizer).__name__} cannot be found by an update of one matrix: "
            f"{type(error).__name__}: {first_line(error)}. Measure instead: leave --estimate out."
        ) from error
    kept = [value for value in probe.state[matrix].values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(value.numel() * value.element_size() for value in kept) / (matrix.numel() * matrix.element_size())


# --- what the kernels of a GPU save -----------------------------------------------------------------------------------------


@final
class AsOnGpu(TorchFunctionMode):
    """Makes functions save for backward what they save on a GPU: attention no matrix of scores, dropout one byte a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        casts = torch.is_autocast_enabled("cpu")
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*(tensor.bfloat16() if casts else tensor for tensor in args[:3]))  # type: ignore[no-untyped-call]
        if func is F.dropout:
            share, is_on = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
            return _Dropout.apply(args[0]) if share and is_on else args[0]  # type: ignore[no-untyped-call]
        if func in IN_FULL and casts and args:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


@final
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@final
class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # unpacked here, which frees it
        return torch.empty_like(gradients[0])

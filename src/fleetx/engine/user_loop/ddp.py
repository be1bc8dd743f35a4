"""A model that is in DistributedDataParallel already: DDP reduces in backward, every other slot of a step is filled as always.

forward    of the wrapper: noted, since DDP decides here whether the coming backward is reduced (`no_sync`, `model.module(x)`)
backward   DDP averages over ranks, and writes `param.grad` when backward ends; inside a merge window it adds to what is there
reduce     nothing is left to do: gradients are copied into the buckets, and the tail (buffers, alarms) is sent by itself

What DDP sends is counted by the formula of an all-reduce of the gradients in their own type; a comm hook's saving is not seen.
DDP's broadcast of buffers in each forward is switched off: buffers are averaged with the update, as without the wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...config.text import listed
from ...dist.comm import Comm
from ...dist.fingerprint import fingerprint
from ...dist.fully_sharded import is_fully_sharded
from ...errors import ConfigError, FleetError
from ..buckets import Buckets
from ..dense_reduce import ReducedInBackward
from ..modules.plain_copy import keep_copies_plain, left_out
from ..slots import Part, Slot

UNWRAPPED = (
    "Leave the model unwrapped: in a plain loop give fleet.distribute(...) the module instead of DDP(module); with Accelerate "
    "use fleetx.integrations.accelerate.Accelerator, with Hugging Face fleetx.integrations.transformers.FleetTrainer, with "
    "Lightning fleetx.integrations.lightning.FleetStrategy, with Ray Train prepare_model(model, parallel_strategy=None)."
)


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the model itself, where it is a DDP wrapper. One deeper inside may leave parameters unreduced: refused elsewhere."""
    return model if isinstance(model, DistributedDataParallel) else None


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside of DDP; any other model as it is."""
    wrapper = wrapper_of(model)
    return model if wrapper is None else wrapper.module


def reduce_conflicts(parts: Sequence[Part]) -> list[str]:
    """Return a sentence for each part that claims what DDP does already; to divide the reduce is to claim it."""
    names = [part.name for part in parts if part.claims() & {Slot.REDUCE, Slot.SHARD}]
    if not names:
        return []
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    claim = "claim" if len(names) > 1 else "claims"
    return [f"{listed} {claim} `reduce`, which DistributedDataParallel already does in backward. {UNWRAPPED}"]


def refuse_other_wrapper(model: nn.Module, own: DistributedDataParallel | None) -> None:
    """Raise inside the forward of a DDP wrapper that is not the pair's own. `own`: the wrapper that was distributed, if one was.

    Its reducer and ours would write the same gradients in one backward, and neither would leave their mean."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is None or active is own or not torch.is_grad_enabled():
        return
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    if any(id(param) in trained for param in active.parameters()):
        raise ConfigError(
            "the model that fleet.distribute(...) has prepared is called through DistributedDataParallel(...), and both would "
            "reduce the same gradients. Leave the line model = DistributedDataParallel(model) out: the gradients of the model "
            "itself are reduced as under it. To keep DistributedDataParallel as the reducer, write model = "
            "DistributedDataParallel(model) first, and then model, optimizer = fleet.distribute(model, optimizer, strategy) "
            "with the wrapper. Where a framework wraps the model, use what fleetx.integrations has for it."
        )


def refuse_steps_of_a_sample(model: nn.Module) -> None:
    """Refuse them: the wrapper's collectives would run there, and a rank that fails alone leaves the others waiting."""
    if isinstance(model, nn.Module) and is_fully_sharded(model):
        raise ConfigError(
            "the model is sharded by fully_shard, and steps of a sample (auto, recompute's budget, find_batch) are run by each "
            "rank alone, while a forward of this model needs all ranks. Plan before the model is sharded, and leave sample= out."
        )
    if isinstance(model, nn.Module) and wrapper_of(model) is not None:
        raise ConfigError(
            "the model is in DistributedDataParallel, and steps of a sample (auto, recompute's budget, find_batch) are run by "
            f"each rank alone. {UNWRAPPED}"
        )


def refuse_unfit(
    wrapper: DistributedDataParallel, params: Mapping[str, nn.Parameter], parts: Sequence[Part], comm: Comm, device: torch.device
) -> None:
    """Settings of the wrapper by which ranks would drift apart."""
    if getattr(wrapper, "mixed_precision", None) is not None:
        raise ConfigError("DistributedDataParallel(mixed_precision=...) is not supported. Leave it out: strategy.amp = True.")
    size = int(wrapper.process_group.size())
    if size != comm.size:
        raise ConfigError(f"DistributedDataParallel reduces over {size} ranks of {comm.size}. Leave process_group= out.")
    placed = next(iter(params.values())).device
    if placed != device:
        raise ConfigError(
            f"DistributedDataParallel holds the model on {placed}; this rank trains on {device}. Wrap model.to(fleet.device())"
            + (", or set FLEETX_DEVICE=cpu." if placed.type == "cpu" else ".")
        )
    ignored = sorted(set(params) & set(getattr(wrapper, "parameters_to_ignore", ())))
    if ignored:
        raise ConfigError(f"DistributedDataParallel was told to ignore `{ignored[0]}`, which would train alone on each rank.")
    talking = [part.name for part in parts if part.talks_in_backward]
    if talking and allows_unused(wrapper):
        raise ConfigError(
            f"{talking[0]} has collectives of its own in backward; with find_unused_parameters or static_graph, DDP's may come "
            f"before them on one rank and after them on another. Leave these out of DistributedDataParallel(...). Or: {UNWRAPPED}"
        )


def allows_unused(wrapper: DistributedDataParallel) -> bool:
    return bool(wrapper.find_unused_parameters or wrapper.static_graph)


@final
class ReducedByDDP(ReducedInBackward):
    """REDUCE, where the wrapper does it: starts nothing, but makes sure that it was done."""

    def __init__(self, wrapper: DistributedDataParallel, comm: Comm) -> None:
        self._wrapper, self.comm = wrapper, comm
        self.allows_unused = allows_unused(wrapper)
        self._reduces: bool | None = None
        """Whether DDP was to reduce after the last forward with gradients; None: there was none since the last update."""
        self._buckets: Buckets | None = None
        self._gradient_bytes = 0
        self._compared = comm.size == 1
        self._broadcast_before = bool(wrapper.broadcast_buffers)
        wrapper.broadcast_buffers = False
        self._handle = wrapper.register_forward_hook(_noting_hook(weakref.ref(self), weakref.ref(wrapper)))
        keep_copies_plain(wrapper)

    def attach(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._gradient_bytes = sum(flat.nbytes for flat in buckets.flats)

    def note_forward(self) -> None:
        if torch.is_grad_enabled() and self._buckets is not None:
            self._reduces = bool(self._wrapper.require_backward_grad_sync)
            self._buckets.show_window()  # model.zero_grad() in a merge window loses nothing, as without the wrapper

    def after_backward(self) -> None:
        """Count what DDP has sent in the micro-step that is over."""
        if self._reduces:
            self.comm.bytes_sent += 2 * (self.comm.size - 1) / self.comm.size * self._gradient_bytes

    def require_done(self, missing: Sequence[str]) -> None:
        """Raise before an update if a rank would go on with gradients of its own. No collective: DDP may be in the middle of
        one."""
        if self.comm.size == 1:
            return
        if missing and not self.allows_unused:
            self._stop(
                f"DistributedDataParallel has reduced nothing: {_quoted(missing)} got no gradient. "
                "If that is intended, write DistributedDataParallel(model, find_unused_parameters=True)."
            )
        if self._reduces is None:
            self._stop(
                "the loss did not come from the DistributedDataParallel wrapper, so that nothing was reduced: only a call of the "
                "wrapper itself, model(x), is seen by it; model.module(x) or another method is not."
            )
        if not self._reduces:
            self._stop(
                "the last micro-step of this window ran inside model.no_sync(), so that its gradients were not reduced. Leave it "
                "out there: with strategy.gradient_merge it is not needed at all."
            )

    def _stop(self, text: str) -> NoReturn:
        self.comm.post_error(text)
        raise FleetError(text)

    def compare(self, buckets: Buckets) -> None:
        """Check once, at the first update, where every rank is, that DDP has left the same gradients on all of them."""
        self._reduces = None
        if self._compared:
            return
        self._compared = True
        mine = {name: f"{int(fingerprint([view])):x}" for b in buckets for name, view in zip(b.names, b.views, strict=True)}
        ranks = self.comm.gather_json(mine)
        unlike = [name for name in mine if len({theirs[name] for theirs in ranks}) > 1]
        if unlike:
            raise FleetError(
                f"DistributedDataParallel has left different gradients of {_quoted(unlike)} on the ranks. Was it made "
                "trainable or added after the model was wrapped, or does a comm hook not average over all ranks?"
            )

    def give_up(self) -> None:
        self._handle.remove()
        self._wrapper.broadcast_buffers = self._broadcast_before


def _noting_hook(stage: Callable[[], ReducedByDDP | None], wrapper: Callable[[], nn.Module | None]) -> Callable[..., None]:
    """Weak: the hook outlives a discarded optimizer."""

    @left_out
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        found = stage()
        if found is not None and module is wrapper():
            found.note_forward()

    return hook


def _quoted(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names], 1)

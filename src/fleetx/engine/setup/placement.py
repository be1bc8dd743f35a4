"""Bring a model onto its device and all ranks to rank 0's values; refuse what cannot be distributed, by name."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...dist.comm import Comm, sharding_of
from ...dist.fully_sharded import is_divided, show_shards
from ...errors import ConfigError, warn_user
from ..modules.plain_copy import keep_copies_plain, left_out
from ..user_loop.model_pairs import owner_of
from .own_optimizer import load_in_place

OUTSIDE = "(outside the model"
"""How the name of a trained parameter begins that no module has."""
BROADCAST_BYTES = 64 * 2**20


def plain_name(name: str) -> str:
    """Parameter names as the user wrote them, whether or not the model is compiled."""
    return name.replace("_orig_mod.", "")


@left_out
def _strip(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in list(state):
        value = state.pop(key)
        state[prefix + key[len(prefix) :].removeprefix("_orig_mod.") if key.startswith(prefix) else key] = value


@left_out
def _restore(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [k for k in state if k.startswith(prefix) and not k.startswith(f"{prefix}_orig_mod.")]:
        state[f"{prefix}_orig_mod.{key[len(prefix) :]}"] = state.pop(key)


def strip_compiled_prefix(model: nn.Module) -> None:
    """Make a compiled model's state dict use the keys of the model inside it; loading takes both spellings."""
    if type(model).__name__ != "OptimizedModule" or _strip in model._state_dict_hooks.values():
        return
    model.register_state_dict_post_hook(_strip)
    model.register_load_state_dict_pre_hook(_restore)
    keep_copies_plain(model)


def named_trainable(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's trainable parameters in the model's registration order; tied ones once."""
    show_shards(model)
    wanted = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = {plain_name(name): p for name, p in model.named_parameters() if id(p) in wanted}
    inside = {id(p) for p in named.values()}
    outside = [p for i, p in wanted.items() if i not in inside]
    named.update({f"{OUTSIDE} {i})": p for i, p in enumerate(outside)})
    if not inside:
        raise ConfigError(
            "the optimizer holds no trainable parameter of this model. Build it on model.parameters(), "
            "and leave at least one with requires_grad=True."
        )
    return named


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in model.named_parameters() if not p.requires_grad}


def refuse_unsuited(model: nn.Module, params: dict[str, nn.Parameter]) -> None:
    """Raise one clear sentence for each kind of model that would train wrongly. Of a model in DDP, the module inside it is
    checked."""
    wrapped = sharding_of(model)
    if wrapped is not None:
        raise ConfigError(f"the model is already distributed ({wrapped}). Give fleet.distribute(...) the bare module.")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"`{name or 'the model'}` makes sparse gradients, which have no place in a flat buffer. Use sparse=False."
            )
    for name, param in params.items():
        if is_lazy(param):
            raise ConfigError(
                f"`{name}` has no shape yet (a lazy module). Run one batch through the model before fleet.distribute(...)."
            )
        if param.is_meta:
            raise ConfigError(
                f"`{name}` is on the meta device. Materialise it first: model.to_empty(device=...), then load or initialise."
            )
        if not param.is_floating_point():
            raise ConfigError(f"`{name}` is {param.dtype}; trainable parameters must be real floating-point tensors.")
        if owner_of(param) is not None:
            raise ConfigError(
                f"`{name}` belongs to a fleet.distribute(...) pair, which goes on training it. Call fleet.find_batch(...) before "
                "fleet.distribute(...)."
            )
    devices = {p.device for p in params.values() if p.device.type == "cuda"}
    if len(devices) > 1:
        raise ConfigError(f"the model is spread over {sorted(map(str, devices))}. One rank drives one device.")


def warn_of_other_modules(params: dict[str, nn.Parameter], comm: Comm, *, syncs_batch_norm: bool) -> None:
    """Name modules outside the model whose parameters are trained: their buffers (BatchNorm statistics) are not seen.

    `syncs_batch_norm`: the strategy has sync_batch_norm, which acts on the model alone."""
    outside = [param for name, param in params.items() if name.startswith(OUTSIDE)]
    if comm.size == 1 or comm.rank != 0 or not outside:
        return
    dicts = {id(d): d for param in outside for d in gc.get_referrers(param) if type(d) is dict}
    owners = [m for d in dicts.values() for m in _holders(d) if any(b is not None for b in m._buffers.values())]
    if owners:
        warn_user(
            f"the optimizer trains parameters of a module outside the model, a {type(owners[0]).__name__} with buffers, whose "
            "statistics would drift apart between ranks"
            + (", and strategy.sync_batch_norm has no effect on it" if syncs_batch_norm else "")
            + ". Give both to fleet.distribute as one: "
            "fleet.distribute(torch.nn.ModuleList([model, other]), optimizer, strategy).",
        )


def warn_of_unowned_gradients(model: nn.Module, comm: Comm) -> None:
    """Name trainable parameters with a gradient that no pair trains: DDP would reduce them, here they are each rank's own."""
    if comm.size == 1 or comm.rank != 0:
        return
    named = ((plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None)
    unowned = [name for name, p in named if owner_of(p) is None]
    if unowned:
        warn_user(
            f"`{unowned[0]}`"
            + (f" and {len(unowned) - 1} more parameters are" if len(unowned) > 1 else " is")
            + " trainable and in no optimizer: the gradients stay local to each rank, and clipping by a norm over all of "
            "model.parameters() would differ between ranks. Freeze them, requires_grad_(False); or, if another optimizer "
            "trains them, distribute it too: model, other = fleet.distribute(model, other, strategy).",
        )


def _holders(parameters: dict[str, Any]) -> list[nn.Module]:
    """Return the modules whose dict of parameters this is."""
    spaces = [space for space in gc.get_referrers(parameters) if type(space) is dict and space.get("_parameters") is parameters]
    direct = [m for m in gc.get_referrers(parameters) if isinstance(m, nn.Module) and m._parameters is parameters]
    held = [m for space in spaces for m in gc.get_referrers(space) if isinstance(m, nn.Module) and m.__dict__ is space]
    return list({id(m): m for m in [*direct, *held]}.values())


def move(model: nn.Module, optimizer: Optimizer, params: dict[str, nn.Parameter], device: torch.device) -> None:
    """Move to the device in place: parameters stay the same objects, and the optimizer's state follows them."""
    if any(t.device != device for t in [*model.parameters(), *model.buffers()]):
        model.to(device)
    for param in params.values():
        if param.device != device:
            param.data = param.data.to(device)
    if optimizer.state:
        # load_state_dict casts and moves state to where its parameter is.
        load_in_place(optimizer, optimizer.load_state_dict, optimizer.state_dict())


def agree_on_model(
    params: dict[str, nn.Parameter], model: nn.Module, optimizer: Optimizer, strategy_text: str, comm: Comm
) -> None:
    """Require the same names, shapes, settings and strategy on all ranks; raise on all of them otherwise."""
    everything = {plain_name(name): p for name, p in model.named_parameters()} | params
    shapes = [f"{name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}" for name, p in everything.items()]
    # Classes too: a part may refuse one, and norm layers are told by theirs; what differs must differ for all or for none.
    shapes += [f"optimizer {type(optimizer).__qualname__}"]
    shapes += [f"module {plain_name(name)} {type(module).__qualname__}" for name, module in model.named_modules()]
    shapes += _group_settings(optimizer)
    shapes += [f"buffer {plain_name(name)} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    digest = hashlib.sha256("\n".join(shapes).encode()).hexdigest()
    ranks = comm.gather_json([digest, strategy_text])
    if any(rank[1] != ranks[0][1] for rank in ranks):
        others = [i for i, rank in enumerate(ranks) if rank[1] != ranks[0][1]]
        raise ConfigError(f"ranks {others} have another strategy than rank 0. Every rank must build the same one.")
    if any(rank[0] != ranks[0][0] for rank in ranks):
        lists = comm.gather_json(shapes)
        for rank, theirs in enumerate(lists):
            difference = sorted(set(theirs) ^ set(lists[0]))
            if difference:
                shown = ", ".join(difference[:5])
                raise ConfigError(f"rank {rank} has another model than rank 0, or another optimizer; they differ in: {shown}.")
        raise ConfigError("ranks have the same parameters in different orders. Build the model alike on every rank.")


def _group_settings(optimizer: Optimizer) -> list[str]:
    """List the settings of each group as text: a learning rate that differs between ranks would drive them apart without a
    word."""
    plain = (bool, int, float, str, tuple, type(None))
    settings = [
        (i, key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
        for i, group in enumerate(optimizer.param_groups)
        for key, value in sorted(group.items())
        if key != "params"
    ]
    return [f"optimizer group {i} {key}={value!r}" for i, key, value in settings if isinstance(value, plain)]


@torch.no_grad()
def broadcast_from_first(model: nn.Module, params: dict[str, nn.Parameter], comm: Comm) -> None:
    """Rank 0's weights and buffers on all ranks, a few large collectives; of divided weights each rank keeps its own part."""
    every = [*model.parameters(), *model.buffers(), *params.values()]
    tensors = {id(t): t.data for t in every if not is_divided(t)}
    broadcast_tensors(list(tensors.values()), comm)


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Rank 0's values on all ranks."""
    for chunk in _chunks(tensors):
        # Bytes: one collective moves every type.
        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in chunk])
        comm.broadcast(flat).wait()
        for t, piece in zip(chunk, flat.split([t.nbytes for t in chunk]), strict=True):
            t.copy_(piece.clone().view(t.dtype).view(t.shape))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        chunk.append(tensor)
        if sum(t.nbytes for t in chunk) >= BROADCAST_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

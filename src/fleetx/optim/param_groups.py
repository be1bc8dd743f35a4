"""Decide which tensors are decayed and which are adapted: two flags per parameter, with the reason.

    decayed    the weight decay of its group acts on it
    adapted    its step is scaled by a trust ratio

Norm layers and biases are neither by default: their norms are small and noisy, and so would be their ratios.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ..config.text import listed
from ..errors import ConfigError, did_you_mean

NORM_WORDS = ("norm", "batch_norm", "layer_norm")
BIAS_WORDS = ("bias", ".b_0")
"""Words for norm layers and biases, also by Paddle's names for them, which do not occur in PyTorch models."""

DEFAULT_EXCLUSIONS = ("norm", "bias")


@dataclass(frozen=True, slots=True)
class Flags:
    """Whether one parameter is decayed and adapted, and why."""

    decay: bool
    adapt: bool
    why: str


FROZEN = Flags(False, False, "frozen")


def moves(param: Tensor) -> bool:
    """Return whether an update may change the parameter; a frozen one may have a gradient set by hand."""
    return param.requires_grad or param.grad is not None


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What decides about one parameter."""

    name: str | None
    """The parameter's name; None where it was given without one."""
    dimensions: int
    in_norm: bool | None = None
    """Whether a norm layer holds it; None where its module is not known."""


def exclusion(info: ParamInfo, words: Sequence[str]) -> str | None:
    """Return why these words exclude the parameter; None if they do not."""
    norms, biases = any(w in NORM_WORDS for w in words), any(w in BIAS_WORDS for w in words)
    if info.name is None:
        return "one dimension, no name" if (norms or biases) and info.dimensions <= 1 else None
    if norms and info.in_norm:
        return "norm layer"
    if biases and info.name.rpartition(".")[2].endswith("bias"):
        return "bias"
    if norms and info.in_norm is None and info.dimensions <= 1:
        return "one dimension, module not known"
    return next((f'"{word}" in its name' for word in words if word in info.name), None)


def require_words_mean_something(words: Sequence[str], infos: Iterable[ParamInfo], *, complete: bool) -> None:
    """Refuse a word that excludes nothing, unless it names a kind of layer or more parameters follow (not `complete`)."""
    every = list(infos)
    named = [k.name for k in every if k.name is not None]
    special = (*NORM_WORDS, *BIAS_WORDS)
    unnamed = len(named) < len(every)
    kinds = {w in NORM_WORDS for w in words if w in special}
    if unnamed and (any(w not in special for w in words) or len(kinds) == 1):
        raise ConfigError(
            f"exclude_from_weight_decay is {list(words)}, but some parameters have no names. Give model=model or "
            'model.named_parameters(); without names only ["norm", "bias"] together (tensors of one dimension) or [] is possible.'
        )
    for word in words:
        if complete and word not in special and not any(word in name for name in named):
            pieces = {piece for name in named for piece in name.split(".")}
            near = did_you_mean(word, [*DEFAULT_EXCLUSIONS, *sorted(pieces)]) or did_you_mean(word.lower(), DEFAULT_EXCLUSIONS)
            raise ConfigError(
                f"exclude_from_weight_decay names {word!r}; no parameter's name contains it.{near} "
                'For norm layers of any name write "norm", for biases "bias".'
            )


def require_own_model(infos: Sequence[Sequence[ParamInfo]], model: object) -> None:
    """Refuse a model that does not hold the parameters: it cannot give their names and layers."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; it must be the nn.Module that holds the parameters.")
    if not any(k.in_norm is not None for of_group in infos for k in of_group) and any(infos):
        raise ConfigError(
            f"model is {type(model).__name__}, and none of the parameters given is in it. Give the model that holds them."
        )


class Named(Protocol):
    @property
    def name(self) -> str | None: ...


def require_distinct_names(infos: Iterable[Sequence[Named]]) -> None:
    """Refuse duplicate names: trust ratios and checkpoints identify tensors by name."""
    counts = Counter(k.name for of_group in infos for k in of_group if k.name is not None)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"several parameters have the same name: {listed(list(map(repr, twice)), 5)}. Give each a name of its own."
        )


TORCHS_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_norm(module: nn.Module, param: Tensor) -> bool:
    """Return whether `param` belongs to a norm layer. A class of the user's counts by its name, except for its matrices, which
    are layers' weights (`NormLinear`, `PreNormMLP`)."""
    return isinstance(module, TORCHS_NORMS) or (param.ndim <= 1 and "norm" in type(module).__name__.lower())


def info_from_model(model: nn.Module) -> dict[int, ParamInfo]:
    """Collect all parameters by id; a tied one has its first name, and is in a norm if any of its owners is one."""
    infos: dict[int, ParamInfo] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            info = infos.get(id(param), ParamInfo(full.replace("_orig_mod.", ""), param.ndim, False))
            infos[id(param)] = dataclasses.replace(info, in_norm=bool(info.in_norm) or is_norm(module, param))
    return infos


def info_of_groups(groups: Sequence[Mapping[str, object]], model: nn.Module | None) -> list[list[ParamInfo]]:
    """Return what is known of every parameter, group by group."""
    by_id = info_from_model(model) if isinstance(model, nn.Module) else {}
    listed: list[list[ParamInfo]] = []
    for group in groups:
        params: Sequence[Tensor] = group["params"]  # type: ignore[assignment]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(params)  # type: ignore[assignment]
        listed.append([by_id.get(id(p)) or ParamInfo(name, p.ndim) for p, name in zip(params, names, strict=True)])
    return listed


def description(rows: Iterable[tuple[str, Tensor, Flags]]) -> str:
    """Format a table with one line per parameter."""
    lines = [("parameter", "shape", "decayed", "adapted", "why")]
    for name, param, flags in rows:
        shape = "x".join(map(str, param.shape)) or "scalar"
        lines.append((name, shape, "yes" if flags.decay else "no", "yes" if flags.adapt else "no", flags.why))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)

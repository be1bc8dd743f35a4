"""Which tensors are decayed and which are adapted: two flags per parameter, each with its reason.

    decayed    the weight decay of its group acts on it
    adapted    its step is scaled by a trust ratio

Norm layers and biases are neither by default: their norms are small and noisy, and so would be their ratios.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..config.text import listed
from ..errors import ConfigError, did_you_mean

NORM_WORDS = ("norm", "batch_norm", "layer_norm")
BIAS_WORDS = ("bias", ".b_0")
"""What Paddle calls its layers is understood as well: those names do not exist in a PyTorch model."""

DEFAULT_EXCLUSIONS = ("norm", "bias")


@dataclass(frozen=True, slots=True)
class Flags:
    decay: bool
    adapt: bool
    why: str


FROZEN = Flags(False, False, "frozen")


def moves(param: Tensor) -> bool:
    """Whether an update may change it. A gradient may also be set by hand."""
    return param.requires_grad or param.grad is not None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a parameter. `in_norm` is None where nobody has said which module holds it."""

    name: str | None
    dimensions: int
    in_norm: bool | None = None


def exclusion(known: Known, words: Sequence[str]) -> str | None:
    """Why this parameter is left out by these words; None if it is not."""
    norms, biases = any(w in NORM_WORDS for w in words), any(w in BIAS_WORDS for w in words)
    if known.name is None:
        return "one dimension, no name" if (norms or biases) and known.dimensions <= 1 else None
    if norms and known.in_norm:
        return "norm layer"
    if biases and known.name.rpartition(".")[2].endswith("bias"):
        return "bias"
    if norms and known.in_norm is None and known.dimensions <= 1:
        return "one dimension, module not known"
    return next((f'"{word}" in its name' for word in words if word in known.name), None)


def require_words_mean_something(words: Sequence[str], known: Iterable[Known], *, complete: bool) -> None:
    """A word that leaves nothing out is a slip, unless it stands for a kind of layer, or more parameters are to come."""
    everything = list(known)
    named = [k.name for k in everything if k.name is not None]
    special = (*NORM_WORDS, *BIAS_WORDS)
    unnamed = len(named) < len(everything)
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


def require_own_model(known: Sequence[Sequence[Known]], model: object) -> None:
    """Another model than that of the parameters knows nothing of their names and layers."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; it must be the nn.Module that holds the parameters.")
    if not any(k.in_norm is not None for of_group in known for k in of_group) and any(known):
        raise ConfigError(
            f"model is {type(model).__name__}, and none of the parameters given is in it. Give the model that holds them."
        )


def require_distinct_names(known: Iterable[Sequence[Known]]) -> None:
    """Ratios and checkpoints tell tensors by their names."""
    counts = Counter(k.name for of_group in known for k in of_group if k.name is not None)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"several parameters have the same name: {listed(list(map(repr, twice)), 5)}. Give each a name of its own."
        )


TORCHS_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_norm(module: nn.Module, param: Tensor) -> bool:
    """Whether this is a norm layer's own parameter. One of the user's is told by its class's name, and there a matrix is a
    layer's weight: `NormLinear`, `PreNormMLP`."""
    return isinstance(module, TORCHS_NORMS) or (param.ndim <= 1 and "norm" in type(module).__name__.lower())


def known_from_model(model: nn.Module) -> dict[int, Known]:
    """By identity of the parameter; one that is tied has its first name, and is in a norm if any of its owners is one."""
    found: dict[int, Known] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            seen = found.get(id(param), Known(full.replace("_orig_mod.", ""), param.ndim, False))
            found[id(param)] = dataclasses.replace(seen, in_norm=bool(seen.in_norm) or is_norm(module, param))
    return found


def known_parameters(groups: Sequence[Mapping[str, object]], model: nn.Module | None) -> list[list[Known]]:
    """For each group, what is known of each of its parameters."""
    by_id = known_from_model(model) if isinstance(model, nn.Module) else {}
    listed: list[list[Known]] = []
    for group in groups:
        params: Sequence[Tensor] = group["params"]  # type: ignore[assignment]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(params)  # type: ignore[assignment]
        listed.append([by_id.get(id(p)) or Known(name, p.ndim) for p, name in zip(params, names, strict=True)])
    return listed


def description(rows: Iterable[tuple[str, Tensor, Flags]]) -> str:
    """One line per parameter."""
    lines = [("parameter", "shape", "decayed", "adapted", "why")]
    for name, param, flags in rows:
        shape = "x".join(map(str, param.shape)) or "scalar"
        lines.append((name, shape, "yes" if flags.decay else "no", "yes" if flags.adapt else "no", flags.why))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)

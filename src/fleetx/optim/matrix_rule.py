"""Decide which tensors Muon orthogonalises and which AdamW keeps: one choice per parameter, with the reason.

Embeddings, heads, norm layers, biases and vectors go to AdamW: their rows mean something each on its own, and a matrix whose
singular values are all alike is no good step for them. Names and modules decide; where neither is known, dimensions alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..config.text import listed
from ..errors import ConfigError, did_you_mean
from .orthogonal import matrix_shape
from .param_groups import FROZEN, is_norm, moves

DEFAULT_EXCLUDE = ("embedding", "head", "norm", "bias")
"""Each of these words means a kind of tensor, whatever its name; other words are looked for in names."""
EMBEDDING_NAMES = ("wte", "wpe", "tok_emb", "pos_emb")
HEAD_NAMES = frozenset(
    "head heads lm_head classifier cls_head score logits to_logits embed_out qa_outputs seq_relationship".split()
)
OUTERMOST_HEAD_NAMES = ("fc", "output")
"""Names of a head where it is a child of the model itself; deeper they are those of hidden layers."""
MATRICES = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Tensor2D:
    """What is known of one parameter, where it is chosen for."""

    name: str | None
    """None where it was given without one."""
    shape: tuple[int, ...]
    modules: tuple[nn.Module, ...] = ()
    """All that hold it: two, where it is tied. Empty where the model is not known."""
    in_norm: bool = False
    is_last_linear: bool = False
    is_repeated: bool = False
    """Whether blocks side by side have one of this name and shape each."""
    vocabulary: tuple[int, int] | None = None
    """Shape of the model's largest embedding."""

    @property
    def leaf(self) -> str:
        """Return the name of the module that holds it."""
        pieces = [piece for piece in (self.name or "").split(".") if piece not in ("weight", "bias")]
        return pieces[-1] if pieces else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether Muon or AdamW updates a parameter, and why."""

    by_muon: bool
    why: str
    is_doubtful: bool = False
    """Whether its name or its place in the model speaks for the other."""


def choose(known: Tensor2D, exclude: Sequence[str]) -> Choice:
    """Choose by what is known of a parameter, and by the words that exclude."""
    if len(known.shape) < 2:
        whys = [_reason(known, word) for word in ("norm", "bias")] if known.name is not None else []
        return Choice(False, next(filter(None, whys), "one dimension or less"))
    if known.name is None:
        return Choice(True, "no name: chosen by its dimensions alone")
    if 1 in matrix_shape(known.shape):
        return Choice(False, "a single row or column")
    if known.modules and len(known.shape) > 2 and not isinstance(known.modules[0], MATRICES):
        return Choice(False, f"{len(known.shape)} dimensions, and no convolution")
    for word in exclude:
        why = _reason(known, word)
        if why is not None:
            return Choice(False, why, _looks_hidden(known, word, why))
    return Choice(True, "a convolution" if len(known.shape) > 2 else "a matrix", "head" in exclude and _looks_like_head(known))


def _reason(known: Tensor2D, word: str) -> str | None:
    """Return why this word excludes the parameter; None if it does not."""
    assert known.name is not None
    if word == "embedding":
        return embedding_reason(known)
    if word == "head":
        return head_reason(known)
    if word == "norm":
        return "norm layer" if known.in_norm or (not known.modules and "norm" in known.name.lower()) else None
    if word == "bias":
        return "bias" if known.name.rpartition(".")[2].endswith("bias") else None
    return f'"{word}" in its name' if word in known.name else None


def embedding_reason(known: Tensor2D) -> str | None:
    """Return why this is an embedding; None if it is not."""
    if any(isinstance(module, EMBEDDINGS) for module in known.modules):
        return "embedding" if len(known.modules) == 1 else "embedding, tied to another layer"
    pieces = (known.name or "").lower().split(".")
    if any("embed" in piece or piece in EMBEDDING_NAMES for piece in pieces) and not known.is_repeated:
        return "named like an embedding"
    return None


def head_reason(known: Tensor2D) -> str | None:
    """Return why this is a head, which makes the model's output; None if it is not."""
    if known.is_repeated:
        return None
    if is_head_name(known):
        return "named like a head"
    if known.is_last_linear:
        return "the last Linear of the model"
    if known.vocabulary is not None and known.shape == known.vocabulary:
        return "its output has the size of the vocabulary"
    return None


def is_head_name(known: Tensor2D) -> bool:
    leaf, depth = known.leaf.lower(), (known.name or "").count(".")
    return leaf in HEAD_NAMES or leaf.endswith("_head") or (leaf in OUTERMOST_HEAD_NAMES and depth <= 1)


def _looks_like_head(known: Tensor2D) -> bool:
    """Return whether a matrix that Muon updates is named like a head, or lies in a module that is."""
    pieces = set((known.name or "").lower().split("."))
    return is_head_name(known) if known.is_repeated else bool(HEAD_NAMES & pieces)


def _looks_hidden(known: Tensor2D, word: str, why: str) -> bool:
    """Return whether a matrix that goes to AdamW looks like a hidden layer: a last Linear that is square, or one that is no
    embedding but for its name."""
    if word == "head":
        return why.startswith("the last Linear") and known.shape[0] == known.shape[1]
    return word == "embedding" and len(known.modules) == 1 and isinstance(known.modules[0], nn.Linear)


def doubts(rows: Iterable[tuple[str, Tensor, Choice]], exclude: Sequence[str]) -> list[str]:
    """Say of doubtful choices what to write if they are wrong."""
    found = [(name, chosen) for name, param, chosen in rows if chosen.is_doubtful and moves(param)]
    kept, excluded = ([name for name, chosen in found if chosen.by_muon is by_muon] for by_muon in (True, False))
    said = []
    if kept:
        words = ", ".join(f'"{word}"' for word in [*exclude, *kept])
        said.append(
            f"Muon updates {listed(_quoted(kept), 3)}, by name part of a head, which AdamW should update. If so, write "
            f'strategy.muon_configs = {{"exclude": [{words}]}}, or exclude=[{words}] in Muon(...).'
        )
    if excluded:
        said.append(
            f"AdamW updates {listed(_quoted(excluded), 3)}, by name or place embeddings or heads, by shape hidden layers. If "
            'Muon should, give the optimizer a group {"params": ..., "use_muon": True} for it.'
        )
    return said


def _quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


# --- what is known of parameters ---------------------------------------------------------------------------------------


def tensors_of_model(model: nn.Module) -> dict[int, Tensor2D]:
    """Return what is known of every parameter, by its id; a tied one counts once, under its first name."""
    names: dict[int, str] = {}
    owners: dict[int, list[nn.Module]] = {}
    params: dict[int, Tensor] = {}
    norms: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            names.setdefault(id(param), full.replace("_orig_mod.", ""))
            owners.setdefault(id(param), []).append(module)
            params[id(param)] = param
            if is_norm(module, param):
                norms.add(id(param))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = id(linears[-1].weight) if linears else None
    tables = [(m.num_embeddings, m.embedding_dim) for m in model.modules() if isinstance(m, EMBEDDINGS)]
    repeated = _repeated({names[i]: tuple(param.shape) for i, param in params.items()})
    return {
        i: Tensor2D(
            name=name,
            shape=tuple(params[i].shape),
            modules=tuple(owners[i]),
            in_norm=i in norms,
            is_last_linear=i == last,
            is_repeated=name in repeated,
            vocabulary=max(tables, default=None),
        )
        for i, name in names.items()
    }


def _repeated(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names that occur in several blocks of a list (`blocks.0.fc.weight`, `blocks.1.fc.weight`) with one shape. A
    layer that is itself an item of a list (`2.weight`) is no block."""

    def pattern(name: str) -> str:
        return re.sub(r"(?<![^.])\d+(?=\.[^.]+\.)", "*", name)

    counts = Counter((pattern(name), shape) for name, shape in shapes.items() if pattern(name) != name)
    return {name for name, shape in shapes.items() if counts[pattern(name), shape] > 1}


def tensors_of_groups(groups: Sequence[Mapping[str, object]], model: nn.Module | None) -> list[list[Tensor2D]]:
    """Return what is known of every parameter, group by group."""
    by_id = tensors_of_model(model) if model is not None else {}
    found: list[list[Tensor2D]] = []
    named: dict[str, tuple[int, ...]] = {}
    for group in groups:
        params: Sequence[Tensor] = group["params"]  # type: ignore[assignment]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(params)  # type: ignore[assignment]
        named |= {name: tuple(p.shape) for name, p in zip(names, params, strict=True) if name is not None}
    repeated = _repeated(named)
    for group in groups:
        params = group["params"]  # type: ignore[assignment]
        names = group.get("param_names") or [None] * len(params)  # type: ignore[assignment]
        found.append(
            [
                by_id.get(id(p)) or Tensor2D(name, tuple(p.shape), is_repeated=name in repeated)
                for p, name in zip(params, names, strict=True)
            ]
        )
    return found


def require_words_in_names(exclude: Sequence[str], known: Iterable[Tensor2D]) -> None:
    """Refuse a word that excludes nothing: it is misspelt, or names have changed."""
    every = list(known)
    named = [one.name for one in every if one.name is not None]
    for word in exclude:
        if word in DEFAULT_EXCLUDE or any(word in name for name in named):
            continue
        pieces = {piece for name in named for piece in name.split(".")}
        near = did_you_mean(word, [*DEFAULT_EXCLUDE, *sorted(pieces)])
        raise ConfigError(
            f"exclude names {word!r}; no parameter's name contains it.{near} These words mean kinds of tensors: "
            f"{', '.join(map(repr, DEFAULT_EXCLUDE))}."
        )


def description(rows: Iterable[tuple[str, Tensor, Choice]]) -> str:
    """Format a table with one line per parameter: its shape, as a matrix where Muon updates it, the optimizer, and why."""
    lines = [("parameter", "shape", "optimizer", "why")]
    for name, param, choice in rows:
        shape = "x".join(map(str, param.shape)) or "scalar"
        if not moves(param):
            lines.append((name, shape, "none", FROZEN.why))
            continue
        if choice.by_muon and param.dim() > 2:
            shape += " as {}x{}".format(*matrix_shape(param.shape))
        lines.append((name, shape, "Muon" if choice.by_muon else "AdamW", choice.why))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)

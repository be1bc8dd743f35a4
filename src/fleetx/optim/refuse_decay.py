"""Refuse weight decay in the optimizer that LARS or LAMB replaces, with the lines to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from ..engine.setup.optimizer_swap import parameter_names
from ..engine.slots import Part, Site
from ..errors import ConfigError
from .param_groups import DEFAULT_EXCLUSIONS, ParamInfo, exclusion, info_from_model


def require_no_decay(part: Part, site: Site, *, key: str, excluded: Sequence[str]) -> None:
    """Refuse inner weight decay, which would act outside the trust ratio; groups without decay become exclusions."""
    groups = site.optimizer.param_groups
    decays = {float(group["weight_decay"]) for group in groups}
    if decays == {0.0}:
        return
    write = f"weight_decay=0 in {type(site.optimizer).__name__}, in all its groups"
    if len(decays - {0.0}) > 1:
        listed = ", ".join(f'"{key}": {float(group["weight_decay"]):g} in group {i}' for i, group in enumerate(groups))
        _refuse_decay(part, decays, f"{write}, and in the groups themselves {listed}")
    names = parameter_names(site.model, site.optimizer)
    plain = [name for group, named in zip(groups, names, strict=True) if not group["weight_decay"] for name in named]
    decayed = [name for group, named in zip(groups, names, strict=True) if group["weight_decay"] for name in named]
    words = exclusion_words(plain, decayed, site.model) if plain else list(excluded)
    if words is None:
        flags = '"decay": False, "adapt": False in each group that has none'
        _refuse_decay(part, decays, f'{write}, strategy.{part.name}_configs = {{"{key}": {max(decays):g}}}, and {flags}')
    listed = ", ".join(f'"{word}"' for word in words)
    line = f'strategy.{part.name}_configs = {{"{key}": {max(decays):g}, "exclude_from_weight_decay": [{listed}]}}'
    _refuse_decay(part, decays, f"{write}, and {line}")


def _refuse_decay(part: Part, decays: set[float], write: str) -> NoReturn:
    listed = " and ".join(f"{decay:g}" for decay in sorted(decays))
    raise ConfigError(
        f"strategy.{part.name} decays weights itself, inside the trust ratio; the optimizer has weight_decay {listed}. "
        f"Write {write}."
    )


def exclusion_words(plain: Sequence[str], decayed: Sequence[str], model: nn.Module) -> list[str] | None:
    """Find few words that exclude all of `plain` and none of `decayed`; None if names cannot separate them."""
    infos = {info.name: info for info in info_from_model(model).values()}

    def leaves_out(word: str) -> set[str]:
        return {n for n in [*plain, *decayed] if exclusion(infos.get(n, ParamInfo(n, 2, False)), [word]) is not None}

    pieces = {".".join(p[i:j]) for p in (n.split(".") for n in plain) for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
    reach = {word: leaves_out(word) for word in [*DEFAULT_EXCLUSIONS, *sorted(pieces, key=lambda w: (len(w), w))]}
    reach = {word: names for word, names in reach.items() if not names & set(decayed)}
    words: list[str] = []
    left = set(plain)
    while left:
        useful = [word for word, names in reach.items() if names & left]
        if not useful:
            return None
        best = max(useful, key=lambda word: (word in DEFAULT_EXCLUSIONS, len(reach[word] & left)))
        words.append(best)
        left -= reach[best]
    return words

"""Which tokens BERT has to guess: a pure function of seed, epoch and sample, for a whole batch at once.

Of the tokens that may be masked, those with the smallest random words are chosen, an exact share of every sequence. Words belong
to positions, so that a sequence is masked alike in any batch and at any padding.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..draws import random_words, uniforms
from ..source import Indices

Ids: TypeAlias = npt.NDArray[np.int64]
Choice: TypeAlias = npt.NDArray[np.bool_]

MASKED, REPLACED = 0.8, 0.1  # the rest of the chosen stay as they are
_ACTIONS, _TOKENS = 2**32, 2**33  # positions of draws that no sequence reaches
_POSITION_BITS = 16


class Masked(NamedTuple):
    """Tokens as the model sees them; and where (in the flattened batch) it has to guess which token was there."""

    ids: Ids
    positions: Ids
    labels: Ids


def how_many(candidates: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """The share, rounded to even, and at least one where there is any."""
    wanted: npt.NDArray[np.int64] = np.maximum(np.rint(share * candidates), 1).astype(np.int64)
    return np.minimum(wanted, candidates)


def choose(candidates: Choice, *, seed: int, epoch: int, indices: Indices, share: float) -> Choice:
    """An exact number of the candidates of each row: those with the smallest words, the lower position first among equals."""
    width = candidates.shape[1]
    positions = np.arange(width, dtype=np.uint64)
    words = random_words(seed, epoch, indices[:, None], positions)
    # The position in the low bits makes every key different, and ranks equal words by it.
    keys = (words >> np.uint64(_POSITION_BITS) << np.uint64(_POSITION_BITS)) | positions
    keys[~candidates] = np.iinfo(np.uint64).max
    counts = how_many(np.count_nonzero(candidates, axis=1), share)
    ranked = np.sort(keys, axis=1)
    limits = ranked[np.arange(len(keys)), np.maximum(counts - 1, 0)]
    return (keys <= limits[:, None]) & candidates


def mask_tokens(
    ids: Ids,
    candidates: Choice,
    *,
    seed: int,
    epoch: int,
    indices: Indices,
    mask_id: int,
    replacements: Ids,
    share: float,
) -> Masked:
    """Of the chosen tokens 80% become [MASK], 10% a random token, 10% stay; all are to be guessed."""
    width = ids.shape[1]
    flat = np.flatnonzero(choose(candidates, seed=seed, epoch=epoch, indices=indices, share=share))
    labels = ids.reshape(-1)[flat]
    sample, position = indices[flat // width], flat % width
    action = uniforms(seed, epoch, sample, position + _ACTIONS)
    drawn = (uniforms(seed, epoch, sample, position + _TOKENS) * len(replacements)).astype(np.int64)
    shown = np.where(action < MASKED, mask_id, np.where(action < MASKED + REPLACED, replacements[drawn], labels))
    masked = ids.copy()
    masked.reshape(-1)[flat] = shown
    return Masked(masked, flat, labels)

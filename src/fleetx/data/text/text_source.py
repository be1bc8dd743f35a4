"""Serve batches of masked sentence pairs for BERT, from Fleet's lines of numbers or from raw text files.

input_ids, token_type_ids, attention_mask     [B, S]; the mask is None where nothing is padded
mlm_positions, mlm_labels                     [M] masked positions in the flattened batch, and the tokens to predict there
next_sentence_label                           [B] as in transformers: 0 where B follows A, 1 where it does not (Fleet: 1 and 0)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..source import Indices
from ..stateless_random import random_words, uniforms
from .pairs import Pairs, Spans
from .tensors import Batch, CompactBatch, compact, widened
from .vocabulary import Vocabulary

# --- Batches of about equally many tokens: samples of similar length together, so that little is padding ---------------

Array: TypeAlias = npt.NDArray[Any]

MULTIPLE = 8  # widths are rounded up to it: matrix units work in tiles of eight
_TIE = 2**35  # position of the draw that orders samples of equal length


def padded_width(longest: int, max_seq_len: int) -> int:
    """Return the width of a batch: its longest sample rounded up to MULTIPLE, at most `max_seq_len`."""
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_seq_len)


def plan_batches(lengths: Array, *, tokens: int, max_seq_len: int, seed: int) -> list[Indices]:
    """Sort samples by falling length, at random among equals, and cut them so that count x padded width is within `tokens`."""
    order = np.lexsort((random_words(seed, 0, np.arange(len(lengths)), _TIE), -np.asarray(lengths)))
    batches, start = [], 0
    while start < len(order):
        count = tokens // padded_width(int(lengths[order[start]]), max_seq_len)
        batches.append(order[start : start + count].astype(np.int64))
        start += count
    return batches


# --- Masking: which tokens BERT has to predict, as a pure function of seed, epoch and sample ----------------------------
# Of the tokens that may be masked, those with the smallest random words are chosen, an exact share of every sequence. Words
# belong to positions, so that a sequence is masked in the same way in any batch and at any padding.

Ids: TypeAlias = npt.NDArray[np.int64]
Choice: TypeAlias = npt.NDArray[np.bool_]

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stay unchanged
_ACTIONS, _TOKENS = 2**32, 2**33  # positions of draws that no sequence reaches
_POSITION_BITS = 16


class Masked(NamedTuple):
    """Tokens after masking, and for each chosen one its position in the flattened batch and the token to predict."""

    ids: Ids
    positions: Ids
    labels: Ids


def mask_counts(candidates: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """Return how many of the candidates to mask: the share, rounded to even, and at least one where there is any."""
    wanted: npt.NDArray[np.int64] = np.maximum(np.rint(share * candidates), 1).astype(np.int64)
    return np.minimum(wanted, candidates)


def choose_masked(candidates: Choice, *, seed: int, epoch: int, indices: Indices, share: float) -> Choice:
    """Choose a fixed number of candidates in each row: those with the smallest words, ties to the lower position."""
    width = candidates.shape[1]
    positions = np.arange(width, dtype=np.uint64)
    words = random_words(seed, epoch, indices[:, None], positions)
    # The position in the low bits makes every key different, and ranks equal words by it.
    keys = (words >> np.uint64(_POSITION_BITS) << np.uint64(_POSITION_BITS)) | positions
    keys[~candidates] = np.iinfo(np.uint64).max
    counts = mask_counts(np.count_nonzero(candidates, axis=1), share)
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
    """Mask tokens: 80% of the chosen ones become [MASK], 10% a random token, 10% stay; all are to be predicted."""
    width = ids.shape[1]
    flat = np.flatnonzero(choose_masked(candidates, seed=seed, epoch=epoch, indices=indices, share=share))
    labels = ids.reshape(-1)[flat]
    sample, position = indices[flat // width], flat % width
    action = uniforms(seed, epoch, sample, position + _ACTIONS)
    drawn = (uniforms(seed, epoch, sample, position + _TOKENS) * len(replacements)).astype(np.int64)
    shown = np.where(action < MASKED, mask_id, np.where(action < MASKED + REPLACED, replacements[drawn], labels))
    masked = ids.copy()
    masked.reshape(-1)[flat] = shown
    return Masked(masked, flat, labels)


# --- The source -----------------------------------------------------------------------------------------------------------


class TextSource:
    """Serve samples of a corpus, or, with `tokens_per_batch`, whole batches planned once for it."""

    reads_files: ClassVar[bool] = True

    def __init__(
        self,
        pairs: Pairs,
        vocabulary: Vocabulary,
        *,
        vocabulary_file: Path,
        digest: str,
        max_seq_len: int,
        seed: int,
        train: bool,
        masked_share: float = 0.15,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.pairs, self.vocabulary, self.vocabulary_file = pairs, vocabulary, vocabulary_file
        self.digest = digest  # equal on nodes that read the same corpus in the same way
        self.max_seq_len, self.seed, self.train, self.masked_share = int(max_seq_len), int(seed), train, masked_share
        self._tokens = np.asarray(pairs.tokens)  # the same mapped pages, without the cost of memmap's own slicing
        self._structural, self._ordinary = vocabulary.is_structural(), vocabulary.ordinary()
        self._dtype = np.int16 if vocabulary.size <= 2**15 else np.int32
        self._plan: list[Indices] | None = None
        if tokens_per_batch is not None:
            self._plan = plan_batches(pairs.lengths, tokens=tokens_per_batch, max_seq_len=max_seq_len, seed=seed)

    @property
    def plans_batches(self) -> bool:
        return self._plan is not None

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def __len__(self) -> int:
        return len(self.pairs.lengths) if self._plan is None else len(self._plan)

    def batch(self, epoch: int, indices: Indices) -> tuple[CompactBatch, list[str]]:
        if self._plan is not None:
            if len(indices) != 1:
                raise ConfigError(f"{len(indices)} planned batches were requested at once; request one.")
            indices = self._plan[indices[0]]
        indices = np.asarray(indices, dtype=np.int64)
        epoch = epoch if self.train else 0  # evaluation uses the same pairs and masks every time
        spans = self.pairs.spans(self.seed, epoch, indices)
        ids, splits, lengths = self._assemble(spans)
        masked = mask_tokens(
            ids,
            ~self._structural[ids],
            seed=self.seed,
            epoch=epoch,
            indices=indices,
            mask_id=self.vocabulary.ids["[MASK]"],
            replacements=self._ordinary,
            share=self.masked_share,
        )
        return compact(masked.ids, masked.positions, masked.labels, splits=splits, lengths=lengths, follows=spans.follows), []

    def finish(self, batch: CompactBatch) -> Batch:
        return widened(batch)

    def _assemble(self, spans: Spans) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Build padded rows of tokens; return them with where B begins in each row, and the rows' lengths."""
        wrap = int(self.pairs.wrapped)
        splits = spans.a_length + 2 * wrap
        lengths = splits + spans.b_length + wrap
        ids_of = self.vocabulary.ids
        shape = (len(lengths), padded_width(int(lengths.max()), self.max_seq_len))
        ids = np.full(shape, ids_of["[PAD]"], dtype=self._dtype)
        rows = zip(
            ids, spans.a_start.tolist(), spans.a_length.tolist(), spans.b_start.tolist(), spans.b_length.tolist(), strict=True
        )
        for row, a, a_length, b, b_length in rows:
            row[wrap : wrap + a_length] = self._tokens[a : a + a_length]
            row[a_length + 2 * wrap : a_length + 2 * wrap + b_length] = self._tokens[b : b + b_length]
        each = np.arange(len(lengths))
        if wrap:
            ids[:, 0] = ids_of["[CLS]"]
            ids[each, splits - 1] = ids_of["[SEP]"]
            ids[each, lengths - 1] = ids_of["[SEP]"]
        else:
            ids[each, lengths - 1] = self._tokens[spans.last]  # a shortened B keeps its last token ([SEP])
        return ids, splits, lengths

"""Choose sentence pairs: where A and B of each sample lie in the corpus, as a pure function of seed, epoch and sample.

document    . . . . . . . . . . . . . | . . . . . . . . . . . . . | . . . . .     cut into pieces of equal length
piece       A A A A A A B B B B B B B                                             at one of its sentences it becomes A and B
half of all A A A A A A               + B B B B B B B                             B comes from another document instead
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from ..source import Indices
from ..stateless_random import uniforms

Array: TypeAlias = npt.NDArray[Any]

_WHERE_A_ENDS, _FOLLOWS, _OTHER, _OTHER_START = (2**34 + number for number in range(4))  # positions of draws


@dataclass(frozen=True, slots=True)
class Spans:
    """Per sample: A and B as ranges of the token array, the position of its last token, and whether B really follows A."""

    a_start: Array
    a_length: Array
    b_start: Array
    b_length: Array
    last: Array
    follows: Array


class Pairs(Protocol):
    """Give the samples of a corpus by number."""

    tokens: Array
    wrapped: bool  # True: [CLS] and [SEP] are still to be added; False: A and B contain them already
    lengths: Array  # largest number of tokens of each sample in any epoch

    def spans(self, seed: int, epoch: int, indices: Indices) -> Spans: ...


def cut_documents(document_ends: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Return start, length and document of each piece. The last piece of a document reaches back, so that it is full too."""
    starts = np.concatenate(([0], document_ends[:-1]))
    sizes = document_ends - starts
    counts = np.where(sizes < 2, 0, -(-sizes // capacity))  # a pair needs two tokens
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    ends = np.minimum(starts[document] + (number + 1) * capacity, document_ends[document])
    begins = np.maximum(ends - capacity, starts[document])
    return begins, ends - begins, document


class DocumentPairs:
    """Make pairs from pieces of documents; B follows A in half of the samples, drawn again in each epoch.

    With a single document, a foreign B comes from another place in it.
    """

    wrapped = True

    def __init__(self, tokens: Array, sentence_ends: Array, document_ends: Array, *, max_seq_len: int, name: str) -> None:
        self.tokens, self._bounds, self._document_ends = tokens, sentence_ends, document_ends
        self._starts, self._sizes, self._document = cut_documents(document_ends, max_seq_len - 3)
        if len(self._starts) < 2:
            raise DataError(f"{name}: too little text, {len(tokens)} tokens, to make sentence pairs of {max_seq_len}.")
        self.lengths = self._sizes + 3
        documents = len(document_ends)
        self._first = np.searchsorted(self._document, np.arange(documents), side="left")
        self._after = np.searchsorted(self._document, np.arange(documents), side="right")
        self._single = bool(self._document[0] == self._document[-1])

    def spans(self, seed: int, epoch: int, indices: Indices) -> Spans:
        start, size = self._starts[indices], self._sizes[indices]
        where, coin, other, other_start = (
            uniforms(seed, epoch, indices, draw) for draw in (_WHERE_A_ENDS, _FOLLOWS, _OTHER, _OTHER_START)
        )
        a_length = self._boundary(start, size, where) - start
        follows = coin < 0.5
        foreign = self._foreign(indices, other, other_start, size - a_length)
        b_start = np.where(follows, start + a_length, foreign)
        room = np.where(follows, size, self._document_end_of(foreign) - foreign + a_length)
        b_length = np.minimum(size, room) - a_length
        return Spans(start, a_length, b_start, b_length, b_start + b_length - 1, follows)

    def _boundary(self, start: Array, size: Array, draw: Array) -> Array:
        """Draw a position strictly inside the piece: one of its sentence ends, or any token in one long sentence."""
        low = np.searchsorted(self._bounds, start, side="right")
        count = np.searchsorted(self._bounds, start + size, side="left") - low
        picked = self._bounds[np.minimum(low + (draw * count).astype(np.int64), len(self._bounds) - 1)]
        return np.asarray(np.where(count > 0, picked, start + 1 + (draw * (size - 1)).astype(np.int64)))

    def _foreign(self, indices: Indices, draw: Array, start_draw: Array, room: Array) -> Array:
        """Draw where B begins in a piece of another document: at a sentence, or earlier if B would be cut short."""
        if self._single:
            first, after = indices, indices + 1
        else:
            first, after = self._first[self._document[indices]], self._after[self._document[indices]]
        rank = (draw * (len(self._starts) - (after - first))).astype(np.int64)
        piece = np.where(rank < first, rank, rank + after - first)
        begin, size, document = self._starts[piece], self._sizes[piece], self._document[piece]
        place = np.where(start_draw < 0.5, begin, self._boundary(begin, size, 2 * (start_draw % 0.5)))
        document_start = np.where(document > 0, self._document_ends[np.maximum(document - 1, 0)], 0)
        return np.asarray(np.maximum(document_start, np.minimum(place, self._document_ends[document] - room)))

    def _document_end_of(self, place: Array) -> Array:
        return np.asarray(self._document_ends[np.searchsorted(self._document_ends, place, side="right")])


class LinePairs:
    """Use Fleet's lines, each a pair already. If all of them are true pairs, half of them get the B of another line."""

    wrapped = False

    def __init__(self, tokens: Array, ends: Array, splits: Array, follows: Array, *, kept: Indices, repair: bool) -> None:
        self.tokens, self._repair = tokens, repair
        starts = np.concatenate(([0], ends[:-1]))
        self.lengths = (ends - starts)[kept]
        self._starts, self._splits, self._follows = starts[kept], splits[kept].astype(np.int64), np.asarray(follows)[kept]

    def spans(self, seed: int, epoch: int, indices: Indices) -> Spans:
        follows, donor = self._follows[indices], indices
        if self._repair:
            follows = uniforms(seed, epoch, indices, _FOLLOWS) < 0.5
            other = (uniforms(seed, epoch, indices, _OTHER) * (len(self.lengths) - 1)).astype(np.int64)
            donor = np.where(follows, indices, other + (other >= indices))
        a_length = self._splits[indices]
        # No longer than the B it replaces: a sample's length must not depend on the epoch, nor give away the label.
        b_length = np.minimum(self.lengths[indices] - a_length, self.lengths[donor] - self._splits[donor])
        last = self._starts[donor] + self.lengths[donor] - 1
        return Spans(self._starts[indices], a_length, self._starts[donor] + self._splits[donor], b_length, last, follows)

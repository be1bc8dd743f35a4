"""Parse Fleet's lines of numbers, `token_ids;sent_ids;pos_ids;label`, into arrays.

    101 7592 102 2088 102;0 0 0 1 1;0 1 2 3 4;1         ids with one space between them; the label is 1 when B follows A

A block of lines is parsed and checked in a few array operations. If a check fails, `fault` goes over the lines one by one to name
the line and the reason; it defines what a line may hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from .files import TextFile, line_blocks, require_unchanged
from .token_cache import ArrayWriter
from .vocabulary import Vocabulary

Array: TypeAlias = npt.NDArray[Any]

MAX_LINE_BYTES = 2**20
_NUMBER = re.compile(r"[0-9]{1,9}")
_FIELDS = ("token_ids", "sent_ids", "pos_ids", "label")
_SPACE, _SEMICOLON, _NEWLINE = 32, 59, 10


@dataclass(frozen=True, slots=True)
class Lines:
    """Parsed lines: all tokens concatenated; for each line its length, the length of A, and whether B follows A."""

    tokens: Array
    lengths: Array
    splits: Array
    follows: Array


def fault(line: bytes, *, vocab_size: int, structural: npt.NDArray[np.bool_]) -> str | None:
    """Say what is wrong with a line (without its line end); None for a valid one."""
    if line.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte order mark. Save the file as UTF-8 without one."
    if line.endswith(b"\r"):
        return "has a Windows line end. Convert the file with `sed -i 's/\\r$//' FILE`."
    try:
        fields = line.decode().split(";")
    except UnicodeDecodeError as error:
        return f"byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8."
    if line == b"":
        return "is empty. Each line is token_ids;sent_ids;pos_ids;label."
    if len(fields) != 4:
        return f"has {len(fields)} fields; 4 are needed, token_ids;sent_ids;pos_ids;label."
    for name, field in zip(_FIELDS, fields, strict=True):
        for word in field.split(" "):
            if not _NUMBER.fullmatch(word):
                return f"{name} holds {word[:40]!r}; allowed are whole numbers from 0 of at most 9 digits, one space between."
    tokens, sentences, positions, label = ([int(word) for word in field.split(" ")] for field in fields)
    return _meaning_fault(tokens, sentences, positions, label, vocab_size=vocab_size, structural=structural)


def _meaning_fault(
    tokens: list[int],
    sentences: list[int],
    positions: list[int],
    label: list[int],
    *,
    vocab_size: int,
    structural: npt.NDArray[np.bool_],
) -> str | None:
    if not len(tokens) == len(sentences) == len(positions):
        return f"has {len(tokens)} token_ids, {len(sentences)} sent_ids and {len(positions)} pos_ids; they must be equally many."
    if max(tokens) >= vocab_size:
        return f"token id {max(tokens)} is not in the vocabulary, which ends at {vocab_size - 1}."
    if max(sentences) > 1:
        return f"sent_ids holds {max(sentences)}; allowed are 0 (sentence A) and 1 (sentence B)."
    if sorted(sentences) != sentences:
        return "sent_ids goes back from 1 to 0; sentence A comes first, then B."
    if positions != list(range(len(positions))):
        return f"pos_ids must count 0 to {len(positions) - 1}, one for each token."
    if len(label) != 1 or label[0] > 1:
        return f"label is {' '.join(map(str, label[:5]))!r}; allowed is 1 (B follows A) or 0 (it does not)."
    if structural[tokens].all():
        return "holds no token that could be masked: only special tokens such as [CLS] and [SEP]."
    return None


def parse_block(block: bytes, *, vocab_size: int, structural: npt.NDArray[np.bool_]) -> Lines | None:
    """Parse a block that ends with a line end; None when any of its lines has a fault."""
    data = np.frombuffer(block, dtype=np.uint8)
    digits = data - np.uint8(48)
    ends = np.flatnonzero(digits > 9)  # each number is followed by exactly one separator
    separators = data[ends]
    starts = np.concatenate(([0], ends[:-1] + 1))
    widths = ends - starts
    if not np.isin(separators, (_SPACE, _SEMICOLON, _NEWLINE)).all() or widths.min() < 1 or widths.max() > 9:
        return None
    values = _numbers(digits, ends, widths)
    last_of_field = np.flatnonzero(separators != _SPACE)
    if len(last_of_field) % 4:
        return None
    if (separators[last_of_field].reshape(-1, 4) != (_SEMICOLON, _SEMICOLON, _SEMICOLON, _NEWLINE)).any():
        return None
    counts = np.diff(last_of_field, prepend=-1).reshape(-1, 4)
    if (counts[:, 1:3] != counts[:, :1]).any() or (counts[:, 3] != 1).any():
        return None
    field = np.repeat(np.tile(np.arange(4, dtype=np.uint8), len(counts)), counts.ravel())
    tokens, sentences, positions, labels = (values[field == number] for number in range(4))
    return _checked(tokens, sentences, positions, labels, lengths=counts[:, 0], vocab_size=vocab_size, structural=structural)


def _checked(
    tokens: Array, sentences: Array, positions: Array, labels: Array, *, lengths: Array, vocab_size: int, structural: Array
) -> Lines | None:
    first = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    if tokens.max() >= vocab_size or sentences.max() > 1 or labels.max() > 1:
        return None
    if (positions != np.arange(len(tokens)) - np.repeat(first, lengths)).any():
        return None
    falls = np.diff(sentences, prepend=0) < 0
    falls[first] = False  # from the last line's B to this line's A
    if falls.any() or not np.logical_or.reduceat(~structural[tokens], first).all():
        return None
    return Lines(tokens, lengths, lengths - np.add.reduceat(sentences, first), labels == 1)


def _numbers(digits: npt.NDArray[np.uint8], ends: Array, widths: Array) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = digits[ends - 1].astype(np.int64)
    for place in range(1, int(widths.max())):
        longer = np.flatnonzero(widths > place)
        values[longer] += digits[ends[longer] - 1 - place].astype(np.int64) * 10**place
    return values


def write_lines(writer: ArrayWriter, files: Sequence[TextFile], vocabulary: Vocabulary, *, max_file_bytes: int) -> dict[str, int]:
    """Parse all files into arrays `tokens`, `ends`, `splits`, `follows`."""
    structural, total, lines, following, pairs = vocabulary.is_structural(), 0, 0, 0, 0
    for file in files:
        before = lines
        for first, block in line_blocks(file.path, name=file.name, max_bytes=max_file_bytes, max_line_bytes=MAX_LINE_BYTES):
            parsed = parse_block(block, vocab_size=vocabulary.size, structural=structural)
            if parsed is None:
                raise DataError(_first_fault(block, file.name, first, vocab_size=vocabulary.size, structural=structural))
            writer.append("tokens", parsed.tokens.astype(vocabulary.dtype))
            writer.append("ends", total + np.cumsum(parsed.lengths, dtype=np.int64))
            writer.append("splits", parsed.splits.astype(np.int32))
            writer.append("follows", parsed.follows)
            total += len(parsed.tokens)
            lines += len(parsed.lengths)
            following += int(parsed.follows.sum())
            pairs += int(_both_maskable(parsed, structural).sum())
        if lines == before:
            raise DataError(f"{file.name}, line 1: the file is empty. Remove it, or its line in the list.")
        require_unchanged(file)
    return {"lines": lines, "following": following, "pairs": pairs}


def _both_maskable(lines: Lines, structural: Array) -> Array:
    """Find lines whose A and B both hold a token that may be masked: only such a B can be moved to another A."""
    first = np.cumsum(lines.lengths) - lines.lengths
    is_b = np.arange(len(lines.tokens)) >= np.repeat(first + lines.splits, lines.lengths)
    free = ~structural[lines.tokens]
    return np.asarray(np.logical_or.reduceat(free & is_b, first) & np.logical_or.reduceat(free & ~is_b, first))


def _first_fault(block: bytes, name: str, first: int, *, vocab_size: int, structural: Array) -> str:
    faults: list[str] = []
    more = 0
    for number, line in enumerate(block[:-1].split(b"\n"), start=first):
        if (reason := fault(line, vocab_size=vocab_size, structural=structural)) is not None:
            more += bool(faults)
            faults = faults or [f"{name}, line {number}: {reason}"]
    if not faults:
        raise RuntimeError(f"{name}, lines from {first}: the two readers of digital lines disagree")
    return faults[0] + (f" {more} more of the lines read so far are bad." if more else "")

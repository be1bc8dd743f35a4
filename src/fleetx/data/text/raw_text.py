"""Tokenise text files into arrays: a document is a file, a sentence is a line that is not blank."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DataError
from .files import TextFile, line_blocks, require_unchanged
from .token_cache import ArrayWriter
from .vocabulary import Vocabulary, make_tokenizer, single_threaded

Array: TypeAlias = npt.NDArray[Any]

SAMPLE_BYTES = 2**22  # a vocabulary trained on more text differs little, and takes longer
_MAX_LINE_BYTES = 2**26
_JOB_LINES = 4096


def write_documents(
    writer: ArrayWriter, files: Sequence[TextFile], vocabulary: Vocabulary, *, max_file_bytes: int
) -> dict[str, Any]:
    """Tokenise all files into arrays `tokens`, `sentence_ends` and `document_ends` (both count tokens)."""
    sizes = np.zeros(len(files), dtype=np.int64)
    total = unknown = 0
    jobs = ((number, lines) for number, file in enumerate(files) for lines in _jobs(file, max_file_bytes))
    for number, tokens, lengths in _Encoder(vocabulary).in_order(jobs):
        writer.append("tokens", tokens)
        writer.append("sentence_ends", total + np.cumsum(lengths, dtype=np.int64))
        sizes[number] += len(tokens)
        total += len(tokens)
        unknown += int(np.count_nonzero(tokens == vocabulary.ids["[UNK]"]))
    if total == 0:
        raise DataError(f"{files[0].name}, line 1: there is no text in this file, nor in the other {len(files) - 1}.")
    writer.append("document_ends", np.cumsum(sizes))
    return {"documents": len(files), "short_documents": int((sizes < 2).sum()), "unknown_share": unknown / total}


def read_texts(file: TextFile, *, max_file_bytes: int) -> Iterator[str]:
    """Read the file in blocks of whole lines. Binary data is an error; Windows line ends and a byte order mark are fine."""
    for first, block in line_blocks(file.path, name=file.name, max_bytes=max_file_bytes, max_line_bytes=_MAX_LINE_BYTES):
        try:
            text = block.decode()
        except UnicodeDecodeError as error:
            line = first + block.count(b"\n", 0, error.start)
            raise DataError(f"{file.name}, line {line}: byte {block[error.start]:#04x} is not UTF-8. {_REMEDY}") from None
        if "\0" in text:
            raise DataError(
                f"{file.name}, line {first + text[: text.index(chr(0))].count(chr(10))}: a NUL byte, so it is not text. {_REMEDY}"
            )
        yield text
    require_unchanged(file)


_REMEDY = 'Take the file out of the folder, or name the endings to read, such as suffixes=(".txt", ".md").'


def sample_texts(files: Sequence[TextFile], *, sample_bytes: int, max_file_bytes: int) -> Iterator[str]:
    """Sample text to train a vocabulary on: files in the order of their names' hashes, only the beginning of a large one."""
    left = sample_bytes
    for file in sorted(files, key=lambda file: hashlib.sha256(file.path.name.encode()).digest()):
        share = min(left, max(sample_bytes // 16, 2**16))
        for line in _lines(file, max_file_bytes):
            yield line
            share -= len(line)
            left -= len(line)
            if share <= 0:
                break
        if left <= 0:
            return


def _lines(file: TextFile, max_file_bytes: int) -> Iterator[str]:
    for text in read_texts(file, max_file_bytes=max_file_bytes):
        yield from (line for line in text.split("\n") if line and not line.isspace())


def _jobs(file: TextFile, max_file_bytes: int) -> Iterator[list[str]]:
    lines = _lines(file, max_file_bytes)
    while job := list(itertools.islice(lines, _JOB_LINES)):
        yield job


class _Encoder:
    """Tokenise in threads of our own: the library works outside the interpreter lock."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = make_tokenizer(vocabulary)
        self._encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        self._dtype = vocabulary.dtype

    def in_order(self, jobs: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, Array, Array]]:
        """Yield each job's number, its tokens and the lengths of its sentences, in the order of the jobs."""
        threads = min(8, len(os.sched_getaffinity(0)))
        jobs = iter(jobs)
        with single_threaded(), ThreadPoolExecutor(threads) as pool:
            while window := list(itertools.islice(jobs, 4 * threads)):
                yield from pool.map(self._encode, window)

    def _encode(self, job: tuple[int, list[str]]) -> tuple[int, Array, Array]:
        number, lines = job
        rows = [encoding.ids for encoding in self._encode_batch(lines, add_special_tokens=False)]
        lengths = np.array([len(row) for row in rows if row], dtype=np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(rows), dtype=self._dtype, count=int(lengths.sum()))
        return number, tokens, lengths

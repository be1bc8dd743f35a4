"""Tokenise documents into arrays: a document is a file or a row of a data set, a sentence is a line that is not blank."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

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


class Corpus(Protocol):
    """Documents by number."""

    what: str
    """Their number and kind, for messages: "12 text files"."""

    def __len__(self) -> int: ...

    def identity(self) -> Any:
        """Return a value for JSON that changes whenever a document does."""

    def name_of(self, document: int) -> str:
        """Return the document's name for messages."""

    def texts(self, document: int) -> Iterator[str]:
        """Read a document in blocks of whole lines."""

    def sample(self) -> Iterable[int]:
        """Give the documents in an order whose beginning stands for all of them."""


class FileCorpus:
    """Documents that are text files."""

    def __init__(self, files: Sequence[TextFile], *, max_file_bytes: int) -> None:
        self._files, self._max_file_bytes = files, max_file_bytes
        self.what = f"{len(files)} text files"

    def __len__(self) -> int:
        return len(self._files)

    def identity(self) -> Any:
        return [[str(file.path.resolve()), file.size, file.mtime_ns] for file in self._files]

    def name_of(self, document: int) -> str:
        return f"{self._files[document].name}, line 1"

    def texts(self, document: int) -> Iterator[str]:
        return read_texts(self._files[document], max_file_bytes=self._max_file_bytes)

    def sample(self) -> Iterable[int]:
        names = [hashlib.sha256(file.path.name.encode()).digest() for file in self._files]
        return sorted(range(len(names)), key=names.__getitem__)


def write_documents(writer: ArrayWriter, corpus: Corpus, vocabulary: Vocabulary) -> dict[str, Any]:
    """Tokenise all documents into arrays `tokens`, `sentence_ends` and `document_ends` (both count tokens)."""
    sizes = np.zeros(len(corpus), dtype=np.int64)
    total = unknown = 0
    jobs = ((number, lines) for number in range(len(corpus)) for lines in _jobs(corpus, number))
    for number, tokens, lengths in _Encoder(vocabulary).in_order(jobs):
        writer.append("tokens", tokens)
        writer.append("sentence_ends", total + np.cumsum(lengths, dtype=np.int64))
        sizes[number] += len(tokens)
        total += len(tokens)
        unknown += int(np.count_nonzero(tokens == vocabulary.ids["[UNK]"]))
    if total == 0:
        raise DataError(f"{corpus.name_of(0)}: there is no text here, nor in any other of the {corpus.what}.")
    writer.append("document_ends", np.cumsum(sizes))
    return {"documents": len(corpus), "short_documents": int((sizes < 2).sum()), "unknown_share": unknown / total}


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


def sample_texts(corpus: Corpus, *, sample_bytes: int) -> Iterator[str]:
    """Sample text to train a vocabulary on: only the beginning of a large document."""
    left = sample_bytes
    for document in corpus.sample():
        share = min(left, max(sample_bytes // 16, 2**16))
        for line in _lines(corpus, document):
            yield line
            share -= len(line)
            left -= len(line)
            if share <= 0:
                break
        if left <= 0:
            return


def _lines(corpus: Corpus, document: int) -> Iterator[str]:
    for text in corpus.texts(document):
        yield from (line for line in text.split("\n") if line and not line.isspace())


def _jobs(corpus: Corpus, document: int) -> Iterator[list[str]]:
    lines = _lines(corpus, document)
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

"""Make a source of BERT batches from a folder or a data set and a vocabulary, through token arrays computed once per node."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError, did_you_mean, warn_user
from .. import hub
from .dataset_texts import DatasetCorpus
from .digital import write_lines
from .files import Kind, TextFile, find_files, is_digital, text_file
from .pairs import DocumentPairs, LinePairs, Pairs
from .raw_text import SAMPLE_BYTES, Corpus, FileCorpus, sample_texts, write_documents
from .text_source import TextSource
from .token_cache import ArrayWriter, Cached, cache_folder, cache_key, cached
from .vocabulary import Vocabulary, import_tokenizers, read_vocabulary, text_vocabulary, train_vocabulary

# --- The corpus "stdlib": sources of Python's standard library, real text that every machine has -----------------------

NAME = "stdlib"
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
_TEST_SHARE = 10  # one file in ten


def is_test_file(name: str) -> bool:
    """Assign a file to the test split by its name, so that the split stays when files come or go."""
    return hashlib.sha256(name.encode()).digest()[0] % _TEST_SHARE == 0


def stdlib_files(*, train: bool, max_bytes: int | None = None) -> list[TextFile]:
    """List sources of the running Python, sorted; at most `max_bytes` of them, chosen by the hash of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    chosen, used = [], 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        file = text_file(root / name, f"{NAME}/{name}")
        if file.size == 0 or is_test_file(name) == train:
            continue
        if max_bytes is not None and used + file.size > max_bytes:
            continue
        chosen.append(file)
        used += file.size
    if not chosen:
        raise DataError(f"{root}: no sources of the standard library here. Give the folder of a text corpus instead.")
    return sorted(chosen, key=lambda file: file.name)


# --- From paths to a source -----------------------------------------------------------------------------------------------

FORMAT = 2  # version of the cached arrays: increase it when their layout or contents change
MOST_UNKNOWN = 0.2


def text_source(
    data_dir: str | os.PathLike[str] | Any,
    vocab_path: str | os.PathLike[str] | None = None,
    *,
    max_seq_len: int,
    seed: int = 0,
    train: bool = True,
    tokens_per_batch: int | None = None,
    kind: Kind = "auto",
    vocab_size: int = 8192,
    masked_share: float = 0.15,
    suffixes: Sequence[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 2**32,
    stdlib_bytes: int | None = None,
) -> TextSource:
    """Make batches of masked sentence pairs from a folder (or one file), a data set, or "stdlib", Python's own sources.

    Fleet's lines of numbers need a vocabulary. For raw text one of `vocab_size` tokens is trained when none is given; evaluation
    (`train` False) then has to name it, `source.vocabulary_file`. A folder with `train.txt`, `val.txt` or `test.txt`
    means the files listed there, or those files themselves where they hold text; one with a folder `train` keeps its splits in
    folders; without any of these all files are read, also for evaluation. `tokens_per_batch` plans whole batches of at most so
    many tokens, padding included.
    """
    _check_paths(data_dir="." if hub.is_dataset(data_dir) else data_dir, vocab_path="." if vocab_path is None else vocab_path)
    _check_numbers(max_seq_len, seed, tokens_per_batch, vocab_size, max_file_bytes, stdlib_bytes)
    _check_choices(masked_share, kind, suffixes, train)
    folder = cache_folder(cache_dir)
    vocabulary_file = None if vocab_path is None else Path(vocab_path)
    vocabulary = None if vocabulary_file is None else read_vocabulary(vocabulary_file)
    if hub.is_dataset(data_dir):
        texts = _of_dataset(data_dir, train=train, kind=kind, suffixes=suffixes, stdlib_bytes=stdlib_bytes)
    elif data_dir == NAME:  # a folder of that name is written "./stdlib"
        texts = _of_stdlib(train=train, max_bytes=stdlib_bytes, max_file_bytes=max_file_bytes)
    else:
        _refuse_stdlib_bytes(stdlib_bytes, str(data_dir))
        files = find_files(Path(data_dir), train=train, kind=kind, suffixes=suffixes, leave_out=vocabulary_file)
        texts = _of_files(files, str(data_dir), kind=kind, max_file_bytes=max_file_bytes)
    if texts.for_vocabulary is texts.corpus:  # "stdlib" knows its training data, also in evaluation
        _require_vocabulary(texts.name, vocabulary, digital=texts.lines is not None, train=train)
    if vocabulary is None or vocabulary_file is None:
        vocabulary_file = trained_vocabulary(texts.for_vocabulary, folder, size=vocab_size)
        vocabulary = read_vocabulary(vocabulary_file)
    arrays = token_arrays(texts, vocabulary, folder, max_file_bytes=max_file_bytes)
    return TextSource(
        (_document_pairs if texts.lines is None else _line_pairs)(arrays, max_seq_len, texts.name),
        vocabulary,
        vocabulary_file=vocabulary_file,
        digest=cache_key(
            vocabulary=vocabulary.digest, tokens=arrays.digest, options=[max_seq_len, seed, tokens_per_batch, masked_share]
        ),
        max_seq_len=max_seq_len,
        seed=seed,
        train=train,
        masked_share=masked_share,
        tokens_per_batch=tokens_per_batch,
    )


@dataclass(frozen=True, slots=True)
class Texts:
    """What to read: documents of text, or `lines`, files of Fleet's numbers."""

    name: str
    corpus: Corpus
    for_vocabulary: Corpus
    lines: Sequence[TextFile] | None = None


def _of_dataset(data: Any, *, train: bool, kind: Kind, suffixes: Sequence[str] | None, stdlib_bytes: int | None) -> Texts:
    _refuse_stdlib_bytes(stdlib_bytes, "a data set")
    for option, given in (('kind="digital"', kind == "digital"), (f"suffixes={suffixes!r}", suffixes is not None)):
        if given:
            raise ConfigError(f"{option} is about files in a folder; a data set holds its texts itself. Leave it out.")
    corpus = DatasetCorpus(data, "train" if train else "val")
    return Texts("the data set", corpus, corpus)


def _of_stdlib(*, train: bool, max_bytes: int | None, max_file_bytes: int) -> Texts:
    corpus, training = (
        FileCorpus(stdlib_files(train=split, max_bytes=max_bytes), max_file_bytes=max_file_bytes) for split in (train, True)
    )
    return Texts(NAME, corpus, training)


def _of_files(files: Sequence[TextFile], name: str, *, kind: Kind, max_file_bytes: int) -> Texts:
    corpus = FileCorpus(files, max_file_bytes=max_file_bytes)
    digital = kind == "digital" or (kind == "auto" and is_digital(files))
    return Texts(name, corpus, corpus, files if digital else None)


def token_arrays(texts: Texts, vocabulary: Vocabulary, folder: Path, *, max_file_bytes: int) -> Cached:
    """Return the corpus as arrays, from the cache or computed now."""
    digital = texts.lines is not None
    key = cache_key(format=FORMAT, digital=digital, files=texts.corpus.identity(), vocabulary=vocabulary.digest)

    def build(writer: ArrayWriter) -> dict[str, Any]:
        if texts.lines is not None:
            return dict(write_lines(writer, texts.lines, vocabulary, max_file_bytes=max_file_bytes))
        return write_documents(writer, texts.corpus, vocabulary)

    return cached(folder, key, build, what=f"the tokens of {texts.corpus.what}")


def trained_vocabulary(corpus: Corpus, folder: Path, *, size: int) -> Path:
    """Return a vocab.txt trained on a part of these texts, from the cache or trained now."""
    import_tokenizers()
    key = cache_key(format=FORMAT, size=size, files=corpus.identity(), sample=SAMPLE_BYTES)

    def build(writer: ArrayWriter) -> dict[str, Any]:
        text = text_vocabulary(train_vocabulary(sample_texts(corpus, sample_bytes=SAMPLE_BYTES), size=size).tokens)
        writer.append("vocab.txt", np.frombuffer(text.encode(), dtype=np.uint8))
        return {}

    return cached(folder, key, build, what=f"a vocabulary of {corpus.what}").folder / "vocab.txt"


def _line_pairs(arrays: Cached, max_seq_len: int, name: str) -> Pairs:
    ends, facts = arrays.arrays["ends"], arrays.facts
    lengths = np.diff(ends, prepend=0)
    kept = np.flatnonzero(lengths <= max_seq_len)
    left_out = len(lengths) - len(kept)
    if len(kept) == 0:
        raise DataError(
            f"{name}: all {left_out} lines are longer than max_seq_len = {max_seq_len}; the shortest has {lengths.min()}."
        )
    if left_out:
        warn_user(
            f"{name}: {left_out} of {len(lengths)} lines are longer than max_seq_len = {max_seq_len} and are left out.",
        )
    repair = facts["following"] == facts["pairs"] == facts["lines"] and len(kept) > 1
    if not repair and facts["following"] in (0, facts["lines"]):
        warn_user(
            f"{name}: every line has the label {int(facts['following'] > 0)}, and no other pairs can be made from these lines: "
            f"the model learns nothing about next sentences.",
        )
    stored = arrays.arrays
    return LinePairs(stored["tokens"], ends, stored["splits"], stored["follows"], kept=kept, repair=repair)


def _document_pairs(arrays: Cached, max_seq_len: int, name: str) -> Pairs:
    if short := arrays.facts["short_documents"]:
        warn_user(
            f"{name}: {short} of {arrays.facts['documents']} documents hold no two tokens, and make no pair.",
        )
    if (share := arrays.facts["unknown_share"]) > MOST_UNKNOWN:
        warn_user(
            f"{name}: {share:.0%} of the tokens are [UNK]. The vocabulary is of another language or script.",
        )
    stored = arrays.arrays
    return DocumentPairs(stored["tokens"], stored["sentence_ends"], stored["document_ends"], max_seq_len=max_seq_len, name=name)


def _refuse_stdlib_bytes(stdlib_bytes: int | None, name: str) -> None:
    if stdlib_bytes is not None:
        raise ConfigError(f'stdlib_bytes = {stdlib_bytes} limits the corpus "stdlib"; {name} is another. Leave it out.')


def _require_vocabulary(data_dir: Any, vocabulary: Vocabulary | None, *, digital: bool, train: bool) -> None:
    if vocabulary is None and digital:
        raise ConfigError(
            f"{data_dir} holds lines of token ids: give the vocabulary they were made with, vocab_path='vocab.txt'."
        )
    if vocabulary is None and not train:
        raise ConfigError(
            "evaluation needs the vocabulary of training: vocab_path=loader.source.vocabulary_file of the training loader."
        )


def _check_paths(**paths: object) -> None:
    for name, path in paths.items():
        if not isinstance(path, str | os.PathLike) or str(path) == "":
            raise ConfigError(f"{name} = {path!r}; allowed is the path of a folder or a file.")


def _check_numbers(
    max_seq_len: int, seed: int, tokens: int | None, vocab_size: int, max_file_bytes: int, stdlib_bytes: int | None
) -> None:
    _whole("max_seq_len", max_seq_len, 5, 2**16)  # [CLS] a [SEP] b [SEP]; masking ranks positions of 16 bits
    _whole("seed", seed, 0, 2**64 - 1)
    _whole("vocab_size", vocab_size, 8, 2**24)
    _whole("max_file_bytes", max_file_bytes, 1, 2**63)
    if stdlib_bytes is not None:
        _whole("stdlib_bytes", stdlib_bytes, 1, 2**63)
    if tokens is not None:
        _whole("tokens_per_batch", tokens, 1, 2**31)
        if tokens < max_seq_len:
            raise ConfigError(
                f"{tokens} tokens per batch are fewer than one sequence of max_seq_len = {max_seq_len} has. With in_tokens=True "
                f"batch_size counts tokens, padding included: use {max_seq_len} or more."
            )


def _check_choices(masked_share: float, kind: str, suffixes: Any, train: bool) -> None:
    if isinstance(masked_share, bool) or not isinstance(masked_share, int | float) or not 0 < masked_share <= 1:
        raise ConfigError(f"masked_share = {masked_share!r}; allowed is a number above 0, up to 1.")
    if kind not in ("auto", "digital", "raw"):
        raise ConfigError(
            f'kind = {kind!r}; allowed are "auto", "digital" and "raw".{did_you_mean(str(kind), ("digital", "raw"))}'
        )
    if suffixes is not None and (
        isinstance(suffixes, str) or not all(isinstance(s, str) and s.startswith(".") for s in suffixes)
    ):
        raise ConfigError(f'suffixes = {suffixes!r}; allowed is a sequence of endings such as (".txt", ".md").')
    if not isinstance(train, bool):
        raise ConfigError(f"train = {train!r}; allowed are True and False.")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ConfigError(f"{name} = {value!r}; allowed is a whole number from {low} to {high}.")

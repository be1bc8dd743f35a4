"""Read a WordPiece vocabulary from a `vocab.txt`, or train one: the same text gives the same one on every machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, DataError
from .files import line_blocks

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_CHARACTERS = 1000  # rarer ones become [UNK], as in BERT
_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. Text is lower-cased before lookup unless the tokens themselves have capital letters."""

    tokens: tuple[str, ...]
    ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {token: number for number, token in enumerate(self.tokens)})

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def lowercase(self) -> bool:
        return not any(token != token.lower() for token in self.tokens if not (token.startswith("[") and token.endswith("]")))

    @property
    def dtype(self) -> npt.DTypeLike:
        """The narrowest type that holds every id."""
        return np.uint16 if self.size <= 2**16 else np.int32

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.tokens).encode()).hexdigest()

    def is_structural(self) -> npt.NDArray[np.bool_]:
        """Mark for each id whether it is never masked. [UNK] may be: it stands for a word."""
        structural = np.zeros(self.size, dtype=np.bool_)
        structural[[self.ids[token] for token in SPECIAL if token != "[UNK]"]] = True
        return structural

    def ordinary(self) -> npt.NDArray[np.int64]:
        """Return the ids that may replace a masked token."""
        return np.array([number for number, token in enumerate(self.tokens) if token not in SPECIAL], dtype=np.int64)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read one token per line; the line number (from 0) is its id. ERNIE's `token<TAB>id` is accepted where the ids agree."""
    if not path.exists():
        raise DataError(f"{path}: there is no such vocabulary. Give the path of a vocab.txt, or None to train one on raw text.")
    blocks = line_blocks(path, name=str(path), max_bytes=2**28, max_line_bytes=2**16)
    tokens: dict[str, int] = {}
    for first, block in blocks:
        for number, line in enumerate(block[:-1].split(b"\n"), start=first):
            token = _token(line, number, path)
            if token in tokens:
                raise DataError(
                    f"{path}, line {number}: {token!r} is on line {tokens[token] + 1} already. Each token has one id."
                )
            tokens[token] = number - 1
    missing = [token for token in SPECIAL if token not in tokens]
    if missing:
        raise DataError(f"{path}, line {len(tokens)}: the vocabulary ends without {', '.join(missing)}. Add a line for each.")
    if len(tokens) == len(SPECIAL):
        raise DataError(f"{path}, line {len(tokens)}: the vocabulary has no tokens beside the special ones.")
    return Vocabulary(tuple(tokens))


def _token(line: bytes, number: int, path: Path) -> str:
    where = f"{path}, line {number}:"
    if line.startswith(b"\xef\xbb\xbf"):
        raise DataError(f"{where} begins with a byte order mark. Save the file as UTF-8 without one.")
    if line.endswith(b"\r"):
        raise DataError(f"{where} has a Windows line end. Convert the file with `sed -i 's/\\r$//' FILE`.")
    try:
        token, tab, number_text = line.decode().partition("\t")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8.") from None
    if token == "" or "\0" in token:
        raise DataError(f"{where} {line[:40]!r} is not a token. Each line holds one, and none is empty.")
    if tab and number_text != str(number - 1):
        raise DataError(f"{where} gives {token!r} the id {number_text[:20]!r}; on this line it has to be {number - 1}.")
    return token


def text_vocabulary(tokens: Iterable[str]) -> str:
    """Format tokens as the text of a vocab.txt."""
    return "".join(f"{token}\n" for token in tokens)


def train_vocabulary(texts: Iterable[str], *, size: int) -> Vocabulary:
    """Train a lower-cased WordPiece vocabulary of at most `size` tokens: special ones, then characters, then pieces.

    The library numbers characters in the order of a hash table and breaks ties by number, so that two runs differ. Here every
    character gets its number beforehand, whole and as a continuation, and the result depends on the text alone.
    """
    tokenizers = import_tokenizers()
    normalizer = _normalizer(lowercase=True)
    lines = [normalizer.normalize_str(text) for text in texts]
    counts = Counter[str]()
    for line in lines:
        counts.update(line)
    common = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    alphabet = sorted(common[:MOST_CHARACTERS])
    rare = str.maketrans(dict.fromkeys(common[MOST_CHARACTERS:], " "))
    numbered = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    if not alphabet:
        raise DataError("there is no text to train a vocabulary on: every file is empty.")
    if size < len(numbered):
        raise ConfigError(
            f"vocab_size = {size} is too small: special tokens and {len(alphabet)} characters need {len(numbered)}."
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=size, special_tokens=numbered, min_frequency=2, show_progress=False)
    with single_threaded():
        tokenizer.train_from_iterator((line.translate(rare) if rare else line for line in lines), trainer)
    ids = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=lambda token: ids[token])))


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """Make BERT's tokenizer: clean, split at spaces and punctuation, longest pieces first. It adds no special tokens."""
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = _normalizer(lowercase=vocabulary.lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Keep the library from starting its own threads: once it has, every process forked later prints a warning, and may hang."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


def _normalizer(*, lowercase: bool) -> Any:
    return import_tokenizers().normalizers.BertNormalizer(lowercase=lowercase)


def import_tokenizers() -> Any:
    """Import `tokenizers`, or raise an error with the line that installs it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError('raw text needs the library `tokenizers`: pip install "fleetx[text]".') from error
    return tokenizers

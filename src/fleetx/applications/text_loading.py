"""Make the loaders of BERT: from Fleet's lines of token ids, raw text in files or a data set, or Python's own sources."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from ..config.kinds import boolean, choice, integer
from ..data import hub
from ..data.loader import Loader
from ..data.text.from_paths import NAME as STDLIB
from ..data.text.from_paths import text_source
from ..errors import ConfigError
from .bert_encoder import BertConfig
from .loader_options import OF_LOADER, of_loader, pick, refuse_unknown, require_place

Path: TypeAlias = str | os.PathLike[str]
Data: TypeAlias = str | os.PathLike[str] | Any
"""A folder, the name of built-in data, or a data set of Hugging Face's `datasets`."""

VOCABULARY = "vocab.txt"
TRAINED_VOCABULARY_SIZE = 8192


class TextOptions(TypedDict, total=False):
    """Keywords of every text loader."""

    seed: int
    """Seed of order, pairs and masks."""
    workers: int
    """Processes that read for this rank; by default its part of the cores. The data are the same with any number."""
    drop_last: bool
    """Leave out the last, smaller batch; True by default in training."""
    masked_share: float
    """Share of the text tokens to mask; 0.15 as in BERT."""
    kind: Literal["auto", "digital", "raw"]
    """"digital": lines of token ids; "raw": text; "auto", the default, decides by the first line of the files."""
    suffixes: Sequence[str]
    """Endings of the files to read in a folder of text, such as (".txt", ".md"); by default all files."""
    vocab_size: int
    """Number of tokens of the vocabulary that is trained when none is given."""
    cache_dir: Path
    """Folder of the token arrays; by default below ~/.cache/fleetx."""


OF_SOURCE = ("seed", "masked_share", "kind", "suffixes", "vocab_size", "cache_dir")


class LoadsText:
    """Mixin of BERT: loaders of batches, dicts of tensors on `fleet.device()`, as `loss` takes them.

    `attention_mask` is None in a batch without padding: attention needs no mask then, and is faster.
    """

    config: BertConfig
    vocabulary_file: Path | None = None
    """Vocabulary of the last training loader, which evaluation must use too; None before the first."""

    def load_digital_dataset_from_file(
        self,
        data_dir: Data,
        vocab_path: Path | None = None,
        max_seq_len: int | None = None,
        batch_size: int = 32,
        in_tokens: bool = False,
        *,
        phase: str = "train",
        shuffle: bool | None = None,
        **options: Unpack[TextOptions],
    ) -> Loader:
        """Load lines `token_ids;sent_ids;pos_ids;label`, plain or gzip, or raw text: the files listed in `train.txt`, or all.

        `batch_size` counts sequences, or with `in_tokens` tokens, padding included. `max_seq_len`: the model's own by default.
        Without `vocab_path`, a vocabulary is trained on raw text and kept at `model.vocabulary_file`, which evaluation uses.
        """
        train = choice("train", "val", "test").check("phase", phase) == "train"
        shuffle = train if shuffle is None else boolean().check("shuffle", shuffle)
        planned = batch_size if boolean().check("in_tokens", in_tokens) else None
        refuse_unknown(options, (*OF_SOURCE, *OF_LOADER), "a loader of text")
        if planned and options.get("drop_last"):
            raise ConfigError(
                "drop_last=True with in_tokens=True: planned batches have no smaller last one. Leave drop_last out."
            )
        if not hub.is_dataset(data_dir) and data_dir != STDLIB:
            require_place(data_dir, "a folder of text, or a data set", (STDLIB,))
        longest = self.config.max_position
        source = text_source(
            data_dir,
            self.vocabulary_file if vocab_path is None and not train else vocab_path,
            max_seq_len=longest if max_seq_len is None else integer(5, longest).check("max_seq_len", max_seq_len),
            train=train,
            tokens_per_batch=planned,
            **{"vocab_size": min(TRAINED_VOCABULARY_SIZE, self.config.vocab_size)} | pick(options, OF_SOURCE),
        )
        if source.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"the vocabulary has {source.vocab_size} tokens, the model {self.config.vocab_size}. "
                f"Build it with vocab_size={source.vocab_size}."
            )
        loader = Loader(source, batch_size, shuffle=shuffle, train=train, **of_loader(options))
        if train:
            self.vocabulary_file = source.vocabulary_file
        return loader

    def get_train_dataloader(
        self,
        data: Data,
        batch_size: int = 32,
        shuffle: bool | None = None,
        *,
        max_seq_len: int | None = None,
        vocab_path: Path | None = None,
        in_tokens: bool = False,
        **options: Unpack[TextOptions],
    ) -> Loader:
        """Load training data: a folder, with its `vocab.txt` if present; a data set with a column `text`; or "stdlib".

        "stdlib" means Python's own sources; a folder of this name is written "./stdlib".
        """
        return self._from_place(data, "train", batch_size, shuffle, max_seq_len, vocab_path, in_tokens, options)

    def get_val_dataloader(
        self,
        data: Data,
        batch_size: int = 32,
        shuffle: bool | None = None,
        *,
        max_seq_len: int | None = None,
        vocab_path: Path | None = None,
        in_tokens: bool = False,
        **options: Unpack[TextOptions],
    ) -> Loader:
        """Load evaluation data, of `val` or `test` where there is such a split: the same masks in every pass."""
        return self._from_place(data, "val", batch_size, shuffle, max_seq_len, vocab_path, in_tokens, options)

    def _from_place(
        self,
        data: Data,
        phase: str,
        batch_size: int,
        shuffle: bool | None,
        max_seq_len: int | None,
        vocab_path: Path | None,
        in_tokens: bool,
        options: TextOptions,
    ) -> Loader:
        if vocab_path is None and (vocab_path := _vocabulary_in(data)) and phase != "train":
            self._require_same(vocab_path)
        return self.load_digital_dataset_from_file(
            data,
            vocab_path,
            max_seq_len,
            batch_size,
            in_tokens,
            phase=phase,
            shuffle=shuffle,
            **options,
        )

    def _require_same(self, own: Path) -> None:
        if self.vocabulary_file and not filecmp.cmp(own, self.vocabulary_file, shallow=False):
            raise ConfigError(
                f"{own} is another vocabulary than {self.vocabulary_file}, with which this model got its training data. "
                "Name the right one with vocab_path=..."
            )


def _vocabulary_in(data: Data) -> Path | None:
    own = os.path.join(data, VOCABULARY) if isinstance(data, str | os.PathLike) else ""
    return own if os.path.isfile(own) else None

"""Read the documents of a data set of Hugging Face's `datasets`: each row's `text` is one document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from ...errors import DataError
from ..hub import column_of, is_kind, split_of

_ROWS_AT_ONCE = 1000
_STRIDE = 7919  # a prime: with it rows from the whole data set come early


class DatasetCorpus:
    """Documents that are the rows of a data set."""

    def __init__(self, data: Any, split: str) -> None:
        dataset = split_of(data, split)
        self._column = column_of(dataset, "the text", ("text",), lambda feature: is_kind(feature, "string", "large_string"))
        self._rows = dataset.select_columns([self._column]).with_format("python")
        self.what = f"{len(dataset)} rows of a data set"
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def identity(self) -> Any:
        """Hash all texts: the same rows have the same tokens, wherever they come from."""
        if self._digest is None:
            self._digest = self._hashed()
        return ["dataset", self._digest]

    def _hashed(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, len(self), _ROWS_AT_ONCE):
            for text in self._rows[start : start + _ROWS_AT_ONCE][self._column]:
                data = (text or "").encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
        return digest.hexdigest()

    def name_of(self, document: int) -> str:
        return f"row {document} of the data set"

    def texts(self, document: int) -> Iterator[str]:
        text = self._rows[document][self._column] or ""
        if "\0" in text:
            raise DataError(
                f"{self.name_of(document)} holds a NUL byte, so it is not text. Leave it out with dataset.filter(...)."
            )
        yield text

    def sample(self) -> Iterable[int]:
        stride = _STRIDE if len(self) % _STRIDE else 1
        return (number * stride % len(self) for number in range(len(self)))

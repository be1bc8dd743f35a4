"""Make a source of images from a data set of Hugging Face's `datasets`: its columns `image` and `label`.

The files are decoded here, not there: with the limits, the drafts and the messages of images in folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import DataError
from .. import hub
from ..hub import column_of, is_kind, split_of
from .class_folders import require_known, require_room
from .files import MAX_FILE_BYTES, read_regular_file, require_size
from .image_list import Numbers
from .list_source import ImageListSource

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


@dataclass(frozen=True, slots=True)
class Rows:
    """Hold the labels of a data set, and name its rows in messages."""

    name: str
    labels: Numbers
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        return f"row {index} of {self.name}"


class DatasetFiles:
    """Read the bytes of the images of a data set, from its own table or from the files that it names."""

    def __init__(self, rows: Any, column: str) -> None:
        self._rows, self._column = rows, column

    def read(self, index: int) -> bytes:
        found = self._rows[index][self._column]
        if found is None or (found["bytes"] is None and found["path"] is None):
            raise DataError("there is no image in this row")
        if found["bytes"] is None:
            return read_regular_file(found["path"], MAX_FILE_BYTES)
        require_size(len(found["bytes"]), MAX_FILE_BYTES)
        return bytes(found["bytes"])


def image_dataset_source(
    data: Any, split: str, *, num_classes: int | None = None, classes: Sequence[str] | None = None, **options: Any
) -> ImageListSource:
    """Open a Dataset, or the split of a DatasetDict. Options: ImageListSource; `train`: by default for split "train"."""
    dataset = split_of(data, split)
    name = f"the data set's split {str(dataset.split)!r}" if getattr(dataset, "split", None) else "the data set"
    image = column_of(dataset, "the images", ("image", "img"), lambda feature: is_kind(feature, "Image"))
    label = column_of(dataset, "the labels", ("label", "labels"), lambda feature: is_kind(feature, "ClassLabel", *_INTEGERS))
    entries = Rows(name, _labels(dataset, label), tuple(getattr(dataset.features[label], "names", None) or ()))
    _require_labels(entries, len(entries.classes) or num_classes)
    if classes is not None and entries.classes:
        entries = _renumbered(entries, classes)
    require_room(entries.classes, entries.name, num_classes)
    rows = dataset.select_columns([image]).with_format(None).cast_column(image, hub.undecoded_images())
    return ImageListSource(entries, DatasetFiles(rows, image), **({"train": split == "train"} | options))


def _labels(dataset: Any, column: str) -> Numbers:
    values = dataset.select_columns([column]).with_format("arrow")[:].column(0)
    if values.null_count:
        row = next(row for row, value in enumerate(values.to_pylist()) if value is None)
        raise DataError(f"row {row} of the data set has no `{column}`. Leave such rows out with dataset.filter(...).")
    return np.asarray(values.to_numpy(), dtype=np.int64)


def _renumbered(rows: Rows, classes: Sequence[str]) -> Rows:
    """Give evaluation data the numbers of the training data's classes."""
    require_known(rows.classes, classes, rows.name)
    number = np.array([list(classes).index(name) for name in rows.classes], dtype=np.int64)
    return Rows(rows.name, number[rows.labels], tuple(classes))


def _require_labels(rows: Rows, limit: int | None) -> None:
    outside = np.flatnonzero((rows.labels < 0) | (rows.labels >= (limit or np.iinfo(np.int64).max)))
    if len(outside):
        row = int(outside[0])
        allowed = "0 or more" if limit is None else f"from 0 to {limit - 1}"
        raise DataError(
            f"{rows.describe(row)} has the label {rows.labels[row]}; labels must be {allowed}. A test split without labels holds "
            "-1: evaluate on another split, or leave such rows out with dataset.filter(...)."
        )

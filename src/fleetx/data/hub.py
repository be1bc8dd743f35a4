"""Recognise data sets of Hugging Face's `datasets`, choose a split, and find the columns that a loader reads.

The library is never imported from here: a caller that holds such an object has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, DataError

SPLITS: dict[str, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "test"), "test": ("test",)}
"""Names of each split in a DatasetDict. Many data sets have a test part only, and are validated on it."""


def is_dataset(data: object) -> bool:
    """Check for a Dataset, a DatasetDict, or their streamed forms."""
    library = sys.modules.get("datasets")
    names = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    kinds = tuple(getattr(library, name) for name in names if hasattr(library, name))
    return isinstance(data, kinds)


def split_of(data: Any, split: str) -> Any:
    """Return the split of a DatasetDict, or the Dataset itself; a streamed one is an error, since it has no numbers."""
    if isinstance(data, dict):
        name = next((name for name in SPLITS[split] if name in data), None)
        if name is None:
            wanted = " nor ".join(map(repr, SPLITS[split]))
            raise DataError(
                f"this DatasetDict has the splits {', '.join(map(repr, data))}, and no {wanted}. Pass the one to use, data[...]."
            )
        data = data[name]
    if not hasattr(data, "__len__"):
        raise ConfigError(
            f"data is a streamed data set ({type(data).__name__}), whose samples have no numbers: they can be neither shuffled "
            "as a whole nor found again after a resume. Load it without streaming=True."
        )
    if getattr(data, "format", {}).get("type") == "custom":
        raise ConfigError(
            "the data set has a transform of its own (set_transform, with_transform), which this loader would not run: it "
            "prepares the samples itself. Pass dataset.with_format(None), or keep the transform and use a DataLoader of your own "
            "with sampler=fleet.sampler(dataset)."
        )
    if len(data) == 0:
        raise DataError("the data set has no rows. Is its filter or its split right?")
    return data


def column_of(dataset: Any, what: str, names: tuple[str, ...], fits: Callable[[Any], bool]) -> str:
    """Find the one column that fits: of one of these names, else the only one of its kind."""
    fitting = [name for name, feature in dataset.features.items() if fits(feature)]
    named = [name for name in names if name in fitting]
    if named or len(fitting) == 1:
        return str((named or fitting)[0])
    shown = ", ".join(f"{name} ({_kind(feature)})" for name, feature in dataset.features.items())
    if not fitting:
        raise ConfigError(f"no column of the data set can be {what}; its columns are {shown}.")
    fix = f'dataset.rename_column("{fitting[0]}", "{names[0]}")'
    raise ConfigError(f"several columns can be {what}: {', '.join(fitting)}. Name the right one `{names[0]}`, as by {fix}.")


def is_kind(feature: Any, *kinds: str) -> bool:
    """Check the class of a feature (`Image`, `ClassLabel`), or the type of a plain one (`string`, `int64`)."""
    return _kind(feature) in kinds


def undecoded_images() -> Any:
    """Make the feature that leaves images as the bytes of their files."""
    return sys.modules["datasets"].Image(decode=False)


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", "")) if type(feature).__name__ == "Value" else type(feature).__name__

"""What a loader reads from. One file per kind of data implements this; `Loader` does the rest."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]


class Source(Protocol):
    """Samples by number. Everything in it must survive a fork, and `batch` must not depend on what was read before."""

    reads_files: ClassVar[bool]
    """Reading is slow enough to deserve processes of its own; arrays in memory are not."""

    @property
    def plans_batches(self) -> bool:
        """A "sample" of it is a whole batch already, such as one of at most so many tokens."""

    def __len__(self) -> int: ...

    def batch(self, epoch: int, indices: Indices) -> tuple[Any, list[str]]:
        """These samples as tensors (a tuple or a dict of them), small in bytes, and a sentence for each one replaced.

        A pure function of its arguments and the source's own seed. A sample that cannot be read is a `DataError` that names
        file and reason, or, where the user allowed it, is replaced by the next readable one and reported in a sentence.
        """

    def finish(self, batch: Any) -> Any:
        """What is left to do on the device: widening small integers, normalising."""

"""Define what a loader reads from: one file per kind of data implements `Source`; `Loader` does the rest."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]


class Source(Protocol):
    """Read samples by number. All state must survive a fork, and `batch` must not depend on what was read before."""

    reads_files: ClassVar[bool]
    """Whether samples come from files, so that reading in worker processes pays; False for arrays in memory."""

    @property
    def plans_batches(self) -> bool:
        """Whether a "sample" is a whole batch already, for example one of at most N tokens."""

    def __len__(self) -> int: ...

    def batch(self, epoch: int, indices: Indices) -> tuple[Any, list[str]]:
        """Read these samples as tensors (a tuple or a dict of them), small in bytes, and a sentence for each one replaced.

        It is a pure function of its arguments and the source's seed. A sample that cannot be read is a `DataError` that names
        file and reason, or, where the user allowed it, is replaced by the next readable one and reported in a sentence.
        """

    def finish(self, batch: Any) -> Any:
        """Do the rest on the device: widen small integers, normalise."""

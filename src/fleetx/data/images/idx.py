"""The IDX files of MNIST and its kin, gzipped: a magic number, the sizes, then one byte for each element."""

from __future__ import annotations

import gzip
import math
import os
import zlib

import numpy as np
import numpy.typing as npt

from ...errors import DataError

UNSIGNED_BYTE = 0x08
MOST_BYTES = 2**30
"""A header can promise any size, and a few gzipped bytes can keep such a promise."""


def read_idx(path: str | os.PathLike[str], dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in the file. A file of another kind, cut short or too long, is a `DataError` that says so."""
    try:
        with gzip.open(path) as file:
            return _read(file, path, dimensions)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    except EOFError:
        raise DataError(f"{path}: the file is cut short.") from None
    except (OSError, zlib.error) as error:  # what gzip finds wrong is an OSError too
        raise DataError(f"{path}: it cannot be read as a gzip file: {error}.") from None


def _read(file: gzip.GzipFile, path: str | os.PathLike[str], dimensions: int) -> npt.NDArray[np.uint8]:
    magic, wanted = _exactly(file, 4), bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if magic != wanted:
        raise DataError(
            f"{path}: it begins with {magic.hex()}; an IDX file of bytes in {dimensions} dimensions with {wanted.hex()}."
        )
    shape = [int(size) for size in np.frombuffer(_exactly(file, 4 * dimensions), dtype=">u4")]
    size = math.prod(shape)
    if not 0 < size <= MOST_BYTES:
        raise DataError(f"{path}: its sizes are {shape}; allowed are 1 to {MOST_BYTES} bytes in all.")
    data = _exactly(file, size)
    if file.read(1):
        raise DataError(f"{path}: it goes on after the {size} bytes that its sizes {shape} promise.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _exactly(file: gzip.GzipFile, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data

"""CIFAR-10 from an archive of JPEG files, decoded once and kept as one .npz file of bytes.

    python -m bench.lib.cifar10 --data ../shared/data/cifar10.tar.xz --processes 16     decodes ahead of a bench; optional

The archive holds the images and the lists `train.txt` and `test.txt`, one `relative/path label` a line. Members are read in
memory and only those on a list are used, so that no path in the archive reaches the disk. This file does without torch:
processes that decode start in a moment.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import multiprocessing
import os
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fleetx.errors import ConfigError, DataError

SIZE = 32
CLASSES = 10
SPLITS = ("train", "test")
CHUNK = 1000
LARGEST_MEMBER = 4 * 2**20
ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "cifar10.tar.xz"
CACHE = Path.home() / ".cache" / "fleetx-bench"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """`images` [N, 32, 32, 3] and `labels` [N], as bytes."""

    images: Bytes
    labels: Bytes

    def __len__(self) -> int:
        return len(self.labels)


def parse_list(text: str, name: str) -> list[tuple[str, int]]:
    """(path, label) of every line of a list of images."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        path, _, label = line.strip().rpartition(" ")
        if not path or not label.isdecimal() or int(label) >= CLASSES:
            raise DataError(f"{name}, line {number}: {line!r} is not `relative/path label` with a label from 0 to {CLASSES - 1}.")
        entries.append((path, int(label)))
    if not entries:
        raise DataError(f"{name} lists no image.")
    return entries


def decode(data: bytes, name: str) -> Bytes:
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{name} is not an image that can be decoded: {error}.") from error
    if pixels.shape != (SIZE, SIZE, 3):
        raise DataError(f"{name} has shape {pixels.shape}; an image of CIFAR-10 has {(SIZE, SIZE, 3)}.")
    return pixels


def decode_chunk(chunk: list[tuple[str, bytes]]) -> list[tuple[str, Bytes]]:
    return [(name, decode(data, name)) for name, data in chunk]


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every plain file; links and devices are passed over, since no list of images may name one."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.size > LARGEST_MEMBER:
                    raise DataError(f"{archive}: {member.name} has {member.size} bytes; no file there needs {LARGEST_MEMBER}.")
                opened = tar.extractfile(member)
                if opened is not None:
                    yield member.name.removeprefix("./"), opened.read()
    except FileNotFoundError as error:
        raise DataError(f"there is no archive {archive}. Pass the place of cifar10.tar.xz with `--data`.") from error
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{archive} cannot be read as a tar archive: {error}.") from error


def read_archive(archive: Path, processes: int = 1) -> dict[str, Images]:
    """All splits. With several processes images are decoded while the rest of the archive is still being unpacked."""
    if isinstance(processes, bool) or processes < 1:
        raise ConfigError(f"processes is {processes!r}; it must be an integer of at least 1.")
    lists: dict[str, str] = {}
    pixels: dict[str, Bytes] = {}
    waiting: list[Future[list[tuple[str, Bytes]]]] = []
    chunk: list[tuple[str, bytes]] = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for name, data in members(archive):
            if name.endswith(".txt"):
                lists[name] = data.decode()
            elif processes == 1:
                pixels[name] = decode(data, name)
            else:
                chunk.append((name, data))
                if len(chunk) == CHUNK:
                    waiting.append(pool.submit(decode_chunk, chunk))
                    chunk = []
        pixels.update(decode_chunk(chunk))
        for future in waiting:
            pixels.update(future.result())
    return {split: assembled(f"{split}.txt", lists, pixels, archive) for split in SPLITS}


def assembled(name: str, lists: dict[str, str], pixels: dict[str, Bytes], archive: Path) -> Images:
    if name not in lists:
        raise DataError(f"{archive} holds no {name}; it must list the images, one `relative/path label` a line.")
    entries = parse_list(lists[name], name)
    missing = [path for path, _ in entries if path not in pixels]
    if missing:
        raise DataError(f"{name} of {archive} lists {missing[0]!r} ({len(missing)} such), which is not in the archive.")
    return Images(np.stack([pixels[path] for path, _ in entries]), np.array([label for _, label in entries], np.uint8))


def load(archive: Path, cache: Path = CACHE, processes: int = 1) -> dict[str, Images]:
    """All splits, from the cache when this very archive was decoded before."""
    kept = cache / f"cifar10-{digest(archive)[:16]}.npz"
    if not kept.exists():
        splits = read_archive(archive, processes)
        cache.mkdir(parents=True, exist_ok=True)
        aside = kept.with_name(f"{kept.stem}.{os.getpid()}.npz")
        np.savez(aside, **{f"{split}_{part}": getattr(splits[split], part) for split in SPLITS for part in ("images", "labels")})
        aside.replace(kept)  # several processes may decode at once: a reader never meets half a file
        return splits
    with np.load(kept, allow_pickle=False) as arrays:
        return {split: Images(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in SPLITS}


def digest(archive: Path) -> str:
    try:
        with archive.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{archive} cannot be read: {error}. Pass the place of cifar10.tar.xz with `--data`.") from error


def held_out(images: Images, every: int = 10) -> tuple[Images, Images]:
    """What is left to train on, and every tenth image of the list: in a list sorted by class, the same number of each class."""
    chosen = np.arange(len(images)) % every == 0
    rest = Images(images.images[~chosen], images.labels[~chosen])
    return rest, Images(images.images[chosen], images.labels[chosen])


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ARCHIVE)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    flags = parser.parse_args()
    start = time.perf_counter()
    splits = load(flags.data, flags.cache, flags.processes)
    print(f"{ {split: len(images) for split, images in splits.items()} } in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    command()

"""Make a source of images from paths.

image_list_source("train.txt", train=True)             a list; images beside it, or under `train/` beside it
image_list_source("train.txt", "images.tar", ...)      a list; images in an archive
image_folder_source("imagenet", "train")               a folder, or a .tar, that holds lists and images
"""

from __future__ import annotations

import os
from typing import Any, Literal, TypeAlias

from ...config.kinds import choice
from ...errors import ConfigError, DataError
from .files import Archive, open_folder, open_tar, read_list_file
from .image_list import parse_image_list
from .list_source import ImageListSource

Split: TypeAlias = Literal["train", "val", "test"]

LISTS: dict[str, tuple[str, ...]] = {"train": ("train.txt",), "val": ("val.txt", "test.txt"), "test": ("test.txt",)}
"""File names of each split's list. Many data sets have a test list only, and are validated on it."""


def image_list_source(
    list_path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    train: bool,
    num_classes: int | None = None,
    **options: Any,
) -> ImageListSource:
    """Open the images named in a list. `root`: their folder or .tar, by default the list's folder. Options: ImageListSource."""
    path = _text("list_path", list_path)
    entries = parse_image_list(read_list_file(path), path, num_classes=num_classes)
    split = os.path.splitext(os.path.basename(path))[0]
    place = (os.path.dirname(path) or ".") if root is None else _text("root", root)
    if os.path.isdir(place):
        return ImageListSource(entries, open_folder(entries, place, split), train=train, **options)
    return ImageListSource(entries, open_tar(entries, Archive(place), b"", split), train=train, **options)


def image_folder_source(
    place: str | os.PathLike[str], split: Split, *, train: bool | None = None, num_classes: int | None = None, **options: Any
) -> ImageListSource:
    """Open a folder or .tar with `train.txt`, and `val.txt` or `test.txt`. `train`: augment, by default for split "train"."""
    choice(*LISTS).check("split", split)
    train = split == "train" if train is None else train
    path = _text("place", place)
    if not os.path.isdir(path):
        return _from_archive(Archive(path), split, train=train, num_classes=num_classes, **options)
    for name in LISTS[split]:
        if os.path.lexists(os.path.join(path, name)):
            return image_list_source(os.path.join(path, name), train=train, num_classes=num_classes, **options)
    raise DataError(
        f"{path} has no {' nor '.join(LISTS[split])}: expected a list with one line `relative/path label` for each image"
    )


def _from_archive(archive: Archive, split: str, *, train: bool, num_classes: int | None, **options: Any) -> ImageListSource:
    name = _list_member(archive, split)
    shown = f"{archive.path}: {os.fsdecode(name)}"
    entries = parse_image_list(archive.read(name), shown, num_classes=num_classes)
    folder = name[: name.rfind(b"/") + 1]
    own_name = os.path.splitext(os.path.basename(os.fsdecode(name)))[0]
    return ImageListSource(entries, open_tar(entries, archive, folder, own_name), train=train, **options)


def _list_member(archive: Archive, split: str) -> bytes:
    """Find the list at the top of the archive, or in its single top folder."""
    for name in map(os.fsencode, LISTS[split]):
        if name in archive.members:
            return name
        inside = [member for member in archive.members if member.endswith(b"/" + name) and member.count(b"/") == 1]
        if len(inside) == 1:
            return inside[0]
        if inside:
            found = ", ".join(sorted(map(os.fsdecode, inside))[:5])
            raise DataError(f"{archive.path} has several lists of that name: {found}; keep one, or unpack it and name the list")
    wanted = " nor ".join(LISTS[split])
    raise DataError(f"{archive.path} has no {wanted}, at its top or in its top folder: expected lines `relative/path label`")


def _text(name: str, path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, got {path!r}")
    return text

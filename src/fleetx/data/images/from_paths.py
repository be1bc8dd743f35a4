"""Make a source of images from paths.

image_list_source("train.txt", train=True)             a list; images beside it, or under `train/` beside it
image_list_source("train.txt", "images.tar", ...)      a list; images in an archive
image_folder_source("imagenet", "train")               a folder, or a .tar, that holds lists and images, or train/CLASS/IMAGE
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ...config.kinds import choice
from ...errors import ConfigError, DataError
from . import class_folders
from .files import Archive, FolderFiles, TarFiles, open_folder, open_tar, read_list_file
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
    place: str | os.PathLike[str],
    split: Split,
    *,
    train: bool | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> ImageListSource:
    """Open a folder or .tar with `train.txt`, and `val.txt` or `test.txt`; or with folders of classes, `train/CLASS/IMAGE`.

    `train`: augment, by default for split "train". `classes`: those of the training data, which evaluation data must share.
    """
    choice(*LISTS).check("split", split)
    options["train"] = split == "train" if train is None else train
    path = _text("place", place)
    if not os.path.isdir(path):
        return _from_archive(Archive(path), split, num_classes, classes, **options)
    for name in LISTS[split]:
        if os.path.lexists(os.path.join(path, name)):
            return image_list_source(os.path.join(path, name), num_classes=num_classes, **options)
    has_other_list = any(os.path.lexists(os.path.join(path, name)) for names in LISTS.values() for name in names)
    folder = None if has_other_list else class_folders.split_folder(path, split)
    if folder is None:
        raise DataError(_nothing_in(path, split))
    if classes is None and split != "train":
        classes = class_folders.classes_beside(path)
    paths, folders = class_folders.paths_in(folder), class_folders.folders_in(folder)
    entries = class_folders.list_classes(paths, folder, folders=folders, num_classes=num_classes, classes=classes)
    return ImageListSource(entries, FolderFiles(entries, os.fsencode(folder)), **options)


def _nothing_in(place: str, split: str, where: str = "") -> str:
    lists, folders = " nor ".join(LISTS[split]), " nor ".join(f"{name}/CLASS" for name in class_folders.SPLITS[split])
    return (
        f"{place} has no {lists}{where}: expected a list with one line `relative/path label` for each image. It has no {folders} "
        "either: folders of classes, each with its images."
    )


def _from_archive(
    archive: Archive, split: str, num_classes: int | None, classes: Sequence[str] | None, **options: Any
) -> ImageListSource:
    name = _list_member(archive, split)
    if name is None:
        return _from_archived_folders(archive, split, num_classes, classes, **options)
    shown = f"{archive.path}: {os.fsdecode(name)}"
    entries = parse_image_list(archive.read(name), shown, num_classes=num_classes)
    folder = name[: name.rfind(b"/") + 1]
    own_name = os.path.splitext(os.path.basename(os.fsdecode(name)))[0]
    return ImageListSource(entries, open_tar(entries, archive, folder, own_name), **options)


def _from_archived_folders(
    archive: Archive, split: str, num_classes: int | None, classes: Sequence[str] | None, **options: Any
) -> ImageListSource:
    found = {name: class_folders.split_member(archive, name) for name in {split, "train"}}
    folder, training = found[split], found["train"]
    if folder is None or any(_list_member(archive, other) for other in LISTS):
        raise DataError(_nothing_in(archive.path, split, ", at its top or in its top folder"))
    if classes is None and split != "train" and training is not None:
        classes = sorted({os.fsdecode(path.split(b"/", 1)[0]) for path in class_folders.members_of(archive, training)})
    paths, shown = class_folders.members_of(archive, folder), f"{archive.path}: {os.fsdecode(folder).rstrip('/')}"
    entries = class_folders.list_classes(paths, shown, num_classes=num_classes, classes=classes)
    return ImageListSource(entries, TarFiles(entries, archive, folder), **options)


def _list_member(archive: Archive, split: str) -> bytes | None:
    """Find the list at the top of the archive, or in its single top folder; None where there is none."""
    for name in map(os.fsencode, LISTS[split]):
        if name in archive.members:
            return name
        inside = [member for member in archive.members if member.endswith(b"/" + name) and member.count(b"/") == 1]
        if len(inside) == 1:
            return inside[0]
        if inside:
            found = ", ".join(sorted(map(os.fsdecode, inside))[:5])
            raise DataError(f"{archive.path} has several lists of that name: {found}; keep one, or unpack it and name the list")
    return None


def _text(name: str, path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, got {path!r}")
    return text

"""List images by their folders, as people keep them: `train/cat/0001.jpg`. Classes are numbered in the order of their names.

A folder is of class `cat` with all images below it, at any depth; their endings tell which files are images. Evaluation
data get the numbers of the training data's classes, whatever classes they themselves hold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...config.text import listed
from ...errors import ConfigError, DataError, warn_user
from .files import Archive
from .image_list import ImageList, offsets_of

ENDINGS = (b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".gif")
SPLITS: dict[str, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test"), "test": ("test",)}
"""Names of each split's folder. Many data sets have a test part only, and are validated on it."""
_ENDINGS_SHOWN = ", ".join(map(os.fsdecode, ENDINGS))
_SHOWN = 5


def is_image_name(name: bytes) -> bool:
    """Check for the ending of an image's name; hidden files are none."""
    return name.lower().endswith(ENDINGS) and not name.startswith(b".")


def list_classes(
    paths: Iterable[bytes],
    name: str,
    *,
    folders: Sequence[str] = (),
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
) -> ImageList:
    """Make a list of `class/image` paths; messages call it `name`.

    `folders`: the folders of classes, each of which must hold an image. `classes`: those of the training data, in their order.
    """
    kept = _images_among(paths, name)
    own = sorted({os.fsdecode(path.split(b"/", 1)[0]) for path in kept})
    known = own if classes is None else list(classes)
    if classes is None and (empty := sorted(set(folders) - set(own))):
        raise DataError(f"{name} has no image of the class {_some(empty)}. Remove these folders, or put images into them.")
    require_known(own, known, name)
    require_room(known, name, num_classes)
    number = {os.fsencode(one): label for label, one in enumerate(known)}
    labels = np.fromiter((number[path.split(b"/", 1)[0]] for path in kept), dtype=np.int64, count=len(kept))
    return ImageList(name, b"".join(kept), offsets_of(kept), labels, tuple(known))


def _images_among(paths: Iterable[bytes], name: str) -> list[bytes]:
    """Sort out the images in folders of classes; other files, unless hidden, are counted in a warning."""
    kept, ignored = [], Counter[str]()
    for path in paths:
        folder, _, file = path.rpartition(b"/")
        if folder and is_image_name(file):
            kept.append(path)
        elif not file.startswith(b"."):
            ignored[f"of {os.fsdecode(os.path.splitext(file)[1]) or 'no ending'}" if folder else "of no class"] += 1
    layout = f"expected one folder for each class, as in {name}/cat/0001.jpg, of images with the endings {_ENDINGS_SHOWN}"
    if not kept:
        raise DataError(f"{name} holds no images: {layout}.")
    if ignored:
        counted = ", ".join(f"{count} {what}" for what, count in ignored.most_common(_SHOWN))
        warn_user(f"{name}: {ignored.total()} files are left out: {counted}; {layout}.")
    return sorted(kept)


def require_known(own: Sequence[str], known: Sequence[str], name: str) -> None:
    """Check that evaluation data have no classes beside the training data's."""
    if strange := [one for one in own if one not in set(known)]:
        raise DataError(
            f"{name} has the class {_some(strange)}, and the training data have not: theirs are {_some(known)}. Give evaluation "
            "data of the same classes, or load them with a model that was not given other training data."
        )


def require_room(classes: Sequence[str], name: str, num_classes: int | None) -> None:
    """Check that the model has an output for each class."""
    if num_classes is not None and len(classes) > num_classes:
        raise ConfigError(
            f"{name} has {len(classes)} classes, the model {num_classes}. Build the model with num_classes={len(classes)}."
        )


def _some(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], _SHOWN)


# --- Where the folders of classes lie: in a folder --------------------------------------------------------------------------


def split_folder(place: str, split: str) -> str | None:
    """Find the folder that holds the split's folders of classes: `place/train`, or `place` itself; None where there is none."""
    for name in SPLITS[split]:
        if folders_in(os.path.join(place, name)):
            return os.path.join(place, name)
    own, of_splits = folders_in(place), {name for names in SPLITS.values() for name in names}
    if any(folders_in(os.path.join(place, name)) for name in of_splits) or of_splits.issuperset(own):
        return None  # it has other splits, or one whose images lie in no folders of classes
    return place


def classes_beside(place: str) -> list[str] | None:
    """Return the classes of the training data that lie beside evaluation data; None where there are none."""
    return folders_in(os.path.join(place, *SPLITS["train"])) or None


def folders_in(folder: str) -> list[str]:
    """Return the names of the folders in it but hidden ones, sorted; none where it is no folder itself."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def paths_in(folder: str) -> Iterator[bytes]:
    """Yield the paths of all files in the folder, relative to it, links followed."""
    yield from (os.fsencode(entry.name) for entry in os.scandir(folder) if not entry.is_dir())
    for name in folders_in(folder):
        yield from _below(folder, name)


def _below(folder: str, name: str) -> Iterator[bytes]:
    root = os.fsencode(folder)
    start = len(os.path.join(root, b""))
    above: dict[bytes, frozenset[tuple[int, int]]] = {}
    for here, folders, names in os.walk(os.path.join(root, os.fsencode(name)), followlinks=True):
        status = os.stat(here)
        own = above.get(os.path.dirname(here), frozenset()) | {(status.st_dev, status.st_ino)}
        above[here] = own
        folders[:] = sorted(folder for folder in folders if not folder.startswith(b".") and not _is_above(here, folder, own))
        yield from (os.path.join(here, file)[start:] for file in sorted(names))


def _is_above(here: bytes, folder: bytes, above: frozenset[tuple[int, int]]) -> bool:
    """Check for a link to a folder that holds it: following it would never end."""
    status = os.stat(os.path.join(here, folder))
    return (status.st_dev, status.st_ino) in above


# --- or in an archive -------------------------------------------------------------------------------------------------------


def split_member(archive: Archive, split: str) -> bytes | None:
    """Find the folder of the split at the top of the archive, or in its single top folder; it ends with a slash."""
    tops = {name.split(b"/", 1)[0] for name in archive.members if b"/" in name}
    places = [b"", *(top + b"/" for top in sorted(tops) if len(tops) == 1)]
    for name in map(os.fsencode, SPLITS[split]):
        for place in places:
            if any(True for _ in members_of(archive, place + name + b"/")):
                return place + name + b"/"
    return None


def members_of(archive: Archive, folder: bytes) -> Iterator[bytes]:
    """Yield the files of the archive that lie in a folder of this folder, relative to it."""
    for name, member in archive.members.items():
        if not member.refused and name.startswith(folder) and b"/" in name[len(folder) :]:
            yield name[len(folder) :]

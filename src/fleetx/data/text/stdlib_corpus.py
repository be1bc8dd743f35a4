"""The Python standard library's own sources as a text corpus: real text that every machine has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from ...errors import DataError
from .files import TextFile, text_file

NAME = "stdlib"
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
_TEST_SHARE = 10  # one file in ten


def is_test_file(name: str) -> bool:
    """The split: by the file's name, so that it stays when files come or go."""
    return hashlib.sha256(name.encode()).digest()[0] % _TEST_SHARE == 0


def stdlib_files(*, train: bool, max_bytes: int | None = None) -> list[TextFile]:
    """Sources of the running Python, sorted; of the whole corpus at most `max_bytes`, chosen by the hash of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    chosen, used = [], 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        file = text_file(root / name, f"{NAME}/{name}")
        if file.size == 0 or is_test_file(name) == train:
            continue
        if max_bytes is not None and used + file.size > max_bytes:
            continue
        chosen.append(file)
        used += file.size
    if not chosen:
        raise DataError(f"{root}: no sources of the standard library here. Give the folder of a text corpus instead.")
    return sorted(chosen, key=lambda file: file.name)

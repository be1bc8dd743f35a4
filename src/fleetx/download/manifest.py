"""Read a manifest, the list of files to download, from YAML or JSON. An unknown key is an error, never skipped.

files:
  - path: train.tar      # below the target folder
    size: 12345          # bytes
    sha256: 9f86d0...    # 64 hexadecimal digits
    url: https://...     # where to read it; without it, beside the manifest
    unpack: true         # unpack a tar, tar.gz, tar.xz or zip into its own folder; default false
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError, did_you_mean
from .folder import BadName, parts_of
from .transport import Address, BadAddress, check_step, has_scheme, parse_address

MAX_BYTES = 16 * 2**20
NAMES = ("manifest.yaml", "manifest.yml", "manifest.json")
ARCHIVES = {".tar": "tar", ".tar.gz": "tar.gz", ".tgz": "tar.gz", ".tar.xz": "tar.xz", ".txz": "tar.xz", ".zip": "zip"}
MAX_NESTING = 16
KEYS = ("path", "size", "sha256", "url", "unpack")
PART = ".part"
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_shortly = reprlib.Repr()  # the plain repr of a few lines of nested YAML could fill the memory
_shortly.maxstring = _shortly.maxother = 120


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a manifest."""

    path: str
    size: int
    sha256: str
    address: Address
    unpack: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))

    @property
    def archive_kind(self) -> str | None:
        return next((kind for ending, kind in ARCHIVES.items() if self.path.lower().endswith(ending)), None)


def parse_manifest(raw: bytes, origin: Address) -> list[Entry]:
    """Parse the bytes of the manifest that was read from `origin`."""
    content = _read(raw, origin)
    if not isinstance(content, dict):
        raise DataError(f"{origin} holds {_shortly.repr(content)}; a manifest begins with `files:` and a list of files.")
    _check_keys(content, ("files",), str(origin), "a manifest has the one key `files`")
    rows = content.get("files")
    if not isinstance(rows, list) or not rows:
        raise DataError(
            f"{origin}: `files` is {_shortly.repr(rows)}; it must be a list of files, each with path, size and sha256."
        )
    entries = [_entry(row, f"{origin}, file {number}", origin) for number, row in enumerate(rows, start=1)]
    _check_together(entries, origin)
    return entries


def _read(raw: bytes, origin: Address) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        is_json = str(origin).endswith(".json") or (not str(origin).endswith((".yaml", ".yml")) and text.lstrip()[:1] == "{")
        return json.loads(text, object_pairs_hook=_unique) if is_json else _read_yaml(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{origin} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise DataError(f"{origin}, line {line} is not YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise DataError(f"{origin} is not YAML: {reprlib.repr(str(error))}.") from None
    except RecursionError:
        raise DataError(f"{origin} is nested too deeply for a manifest.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}, line {error.lineno} is not JSON: {error.msg}.") from None
    except ValueError as error:  # thousands of digits, a 13th month, a key given twice, an alias
        raise DataError(f"{origin} cannot be read: {error}.") from None
    except (AttributeError, TypeError, KeyError, IndexError, ArithmeticError):  # what PyYAML raises for `!!timestamp x`
        raise DataError(f"{origin} cannot be read: it gives a value a kind (with !!) that it does not have.") from None


def _read_yaml(text: str) -> Any:
    """Load YAML after a pass over its events: the C loader crashes on deep nesting instead of raising."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise RecursionError
        if isinstance(event, yaml.AliasEvent):  # a few lines of `<<: [*a, *a, *a]` would fill any memory
            raise ValueError(f"it has the alias *{_shortly.repr(event.anchor)}; write out each file instead")
    return yaml.load(text, _Loader)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of the pairs, and refuse a key given twice, which both parsers accept silently."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {_shortly.repr(key)} is given twice")
        mapping[key] = value
    return mapping


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The safe loader (the C one if it is built: a manifest may have 100,000 lines) that refuses keys given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        scalars = [(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        try:
            _unique(scalars)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
        return dict(super().construct_mapping(node, deep=deep))


def _check_keys(mapping: Mapping[Any, Any], known: Iterable[str], where: str, allowed: str) -> None:
    for key in mapping:
        if key not in known:
            hint = did_you_mean(key, known) if isinstance(key, str) else ""
            raise DataError(f"{where}: the key {_shortly.repr(key)} is not known; {allowed}.{hint}")


def _entry(row: Any, where: str, origin: Address) -> Entry:
    if not isinstance(row, dict):
        raise DataError(f"{where} is {_shortly.repr(row)}; write path, size and sha256 for each file.")
    _check_keys(row, KEYS, where, f"a file has {', '.join(KEYS)}")
    path = _path(row.get("path"), where)
    where = f"{where} ({path})"
    size, sha256, unpack = row.get("size"), row.get("sha256"), row.get("unpack", False)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise DataError(f"{where}: size is {_shortly.repr(size)}; it must be the number of bytes, an integer of at least 0.")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise DataError(
            f"{where}: sha256 is {_shortly.repr(sha256)}; it must be 64 hexadecimal digits (in quotes, if all are 0-9)."
        )
    if not isinstance(unpack, bool):
        raise DataError(f"{where}: unpack is {_shortly.repr(unpack)}; it must be true or false.")
    entry = Entry(path, size, sha256.lower(), _address(row, path, where, origin), unpack)
    if unpack and entry.archive_kind is None:
        raise DataError(f"{where}: unpack is true, but only names that end in {', '.join(ARCHIVES)} can be unpacked.")
    return entry


def _path(path: Any, where: str) -> str:
    if not isinstance(path, str):
        raise DataError(f"{where}: path is {_shortly.repr(path)}; it must be a name below the target folder, such as train.tar.")
    try:
        parts = parts_of(path)
    except BadName as error:
        raise DataError(f"{where}: the path {_shortly.repr(path)} {error}.") from None
    if "/".join(parts) != path:
        raise DataError(f"{where}: the path {_shortly.repr(path)} is not plain; write it without ./, // and a / at the end.")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: the path {_shortly.repr(path)} is not Unicode text.") from None
    return path


def _address(row: Mapping[str, Any], path: str, where: str, origin: Address) -> Address:
    if "url" not in row:
        return origin.parent / path if isinstance(origin, Path) else origin.beside(path)
    url = row["url"]
    if not isinstance(url, str) or not has_scheme(url):
        kind = "an address" if isinstance(url, str) else f"a {type(url).__name__}"  # the text may hold a password: not shown
        raise DataError(f"{where}: url is {kind} without a kind; write the whole address, https://host/path, or leave url out.")
    try:
        address = parse_address(url)
        check_step(origin, address)
    except BadAddress as error:
        raise DataError(f"{where}: {error}") from None
    return address


def _check_together(entries: list[Entry], origin: Address) -> None:
    """Refuse two files for one place: as file, as folder, or as the unfinished part of another."""
    paths: set[str] = set()
    for entry in entries:
        if entry.path in paths:
            raise DataError(f"{origin}: the path {entry.path} is given twice.")
        paths.add(entry.path)
    for entry in entries:
        if entry.path.endswith(PART) and entry.path.removesuffix(PART) in paths:
            raise DataError(f"{origin}: {entry.path} is where {entry.path.removesuffix(PART)} lies while unfinished; rename it.")
        for depth in range(1, len(entry.parts)):
            if "/".join(entry.parts[:depth]) in paths:
                raise DataError(f"{origin}: {'/'.join(entry.parts[:depth])} is both a file and the folder of {entry.path}.")

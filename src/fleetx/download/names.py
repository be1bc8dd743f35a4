"""Names that others chose (a manifest, an archive): only plain relative ones, which lead nowhere but below the target."""

from __future__ import annotations

import re

RESERVED = ".fleetx-"
"""How the names of our own notes in a target folder begin."""
MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 250
"""File systems allow 255, and an unfinished file is called NAME.part."""

# A name with a line break or an escape sequence could forge lines of a log or of a file list.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_DRIVE = re.compile(r"[A-Za-z]:")


class BadName(Exception):
    """Why a name cannot be used; a sentence without its subject."""


def parts_of(name: str) -> tuple[str, ...]:
    """The components of a relative name, without the "." ones and empty ones; none at all for "./"."""
    if not name:
        raise BadName("is empty")
    if _CONTROL.search(name):
        raise BadName("contains a control character")
    if "\\" in name:
        raise BadName("contains a backslash; folders are separated by /")
    if name.startswith("/") or _DRIVE.match(name):
        raise BadName("is absolute; only names below the target are allowed")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise BadName("contains ..; only names below the target are allowed")
    if len(parts) > MAX_DEPTH:
        raise BadName(f"is {len(parts)} folders deep; at most {MAX_DEPTH} are allowed")
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BadName("is not Unicode text") from None
    for part in parts:
        if len(part.encode("utf-8", "surrogateescape")) > MAX_COMPONENT_BYTES:
            raise BadName(f"has a part longer than {MAX_COMPONENT_BYTES} bytes")
        if part.startswith(RESERVED):
            raise BadName(f"begins with {RESERVED}, which is kept for notes of the downloader")
    return parts


def shown(name: str) -> str:
    """For a message: quoted, escaped, and never longer than a line."""
    return repr(name) if len(name) <= 120 else repr(name[:100]) + f"... ({len(name)} characters)"

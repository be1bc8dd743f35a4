"""Where bytes may come from: a local file, https, and plain http from this very machine only.

Passwords and query strings (which often hold a signature) are never shown: `str(address)` leaves them out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least
_NOT_IN_URLS = re.compile(r"[^\x21-\x7e]")


class BadAddress(Exception):
    """Why an address cannot be used: a whole sentence that shows no password."""


@dataclass(frozen=True, slots=True)
class Remote:
    url: str = field(repr=False)
    """Without user name, password and fragment."""
    login: str | None = field(default=None, repr=False)
    """user:password, sent to this host and to no other."""

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def is_plain(self) -> bool:
        return self.url.startswith("http:")

    def beside(self, path: str) -> Remote:
        """A file in the same folder or below it; the query belongs to the one address it came with."""
        parts = urlsplit(self.url)
        folder = parts.path.rpartition("/")[0]  # not urljoin, which takes a//b for a/b: to a bucket these are two places
        return Remote(urlunsplit(parts._replace(path=f"{folder}/{quote(path)}", query="")), self.login)


Address: TypeAlias = Path | Remote


def shown_url(url: str) -> str:
    """An address as it may be printed: no user, password, query or fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def has_scheme(text: str) -> bool:
    return _SCHEME.match(text) is not None


def parse_address(text: str) -> Address:
    """A path, or a file:, https: or http: address."""
    match = _SCHEME.match(text)
    if match is None:
        return Path(os.path.expanduser(text))
    scheme = match[1].lower()
    if scheme not in ("file", "https", "http"):
        raise BadAddress(f"addresses of the kind {scheme}: are not read. Write a path, or a file: or https: address.")
    if _NOT_IN_URLS.search(text):
        raise BadAddress(f"the {scheme}: address contains a space or another character that must be %-encoded.")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise BadAddress(
            f"the {scheme}: address has a host or port that cannot be read; write {scheme}://host:port/path."
        ) from None
    if scheme == "file":
        return _local_path(parts, host)
    if not host:
        raise BadAddress(f"the {scheme}: address names no host; write {scheme}://host/path.")
    return _remote(parts, host)


def _local_path(parts: SplitResult, host: str) -> Path:
    if host not in ("", "localhost"):
        raise BadAddress(f"the file: address names the host {host}; write file:///path, a file of this machine.")
    if parts.query or parts.fragment or not parts.path.startswith("/"):
        raise BadAddress("a file: address is file:///path, with ? and # written as %3F and %23.")
    path = unquote(parts.path)
    if "\0" in path:
        raise BadAddress("the file: address contains a NUL character.")
    return Path(path)


def _remote(parts: SplitResult, host: str) -> Remote:
    if parts.scheme == "http" and host not in LOOPBACK:
        raise BadAddress(
            f"{shown_url(parts.geturl())} is plain http, which anybody on the way can read and change. Write https:; "
            f"http: is allowed only for {', '.join(LOOPBACK)}."
        )
    userinfo, _, netloc = parts.netloc.rpartition("@")
    clean = parts._replace(netloc=netloc, path=parts.path or "/", fragment="")
    return Remote(urlunsplit(clean), unquote(userinfo) if userinfo else None)


def check_step(before: Address, after: Address) -> None:
    """May one address lead to the other, by a redirect or as an entry of a manifest? Only to a place at least as safe."""
    if isinstance(before, Path):
        return
    if isinstance(after, Path):
        raise BadAddress(f"{before} leads to a local file, {after}. Only a local manifest may name local files.")
    if after.is_plain and not before.is_plain:
        raise BadAddress(f"{before} leads to {after}: from https to plain http, where the bytes could be changed on the way.")

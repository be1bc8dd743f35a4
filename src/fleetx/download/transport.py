"""Addresses that may be read (local files, https, and http of this machine), and one attempt to read one from an offset.

Passwords and query strings (which often hold a signature) are never shown: `str(address)` leaves them out. `fetch.retry`
repeats an attempt that raised Broken.
"""

from __future__ import annotations

import base64
import contextlib
import http
import http.client
import os
import re
import socket
import ssl
import stat
import string
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from ..errors import DataError

MAX_REDIRECTS = 10
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)")
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]*"')
_NUMBER = re.compile(r"\d{1,19}")
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})\b")
_NOT_IN_URLS = re.compile(r"[^\x21-\x7e]")


class BadAddress(Exception):
    """Raised for an address that cannot be used; the text is a whole sentence that shows no password."""


@dataclass(frozen=True, slots=True)
class Remote:
    """An https address, or an http one of this machine."""

    url: str = field(repr=False)
    """Address without user name, password and fragment."""
    login: str | None = field(default=None, repr=False)
    """user:password, sent to this host and to no other; None without one."""

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def is_plain(self) -> bool:
        return self.url.startswith("http:")

    def beside(self, path: str) -> Remote:
        """Return the address of a file in the same folder or below it, without the query."""
        parts = urlsplit(self.url)
        folder = parts.path.rpartition("/")[0]  # not urljoin, which takes a//b for a/b: to a bucket these are two places
        return Remote(urlunsplit(parts._replace(path=f"{folder}/{quote(path)}", query="")), self.login)


Address: TypeAlias = Path | Remote


def shown_url(url: str) -> str:
    """Format an address for a message, without user, password, query and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def has_scheme(text: str) -> bool:
    return _SCHEME.match(text) is not None


def parse_address(text: str) -> Address:
    """Parse a path, or a file:, https: or http: address."""
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
            f"{shown_url(parts.geturl())} is plain http, which others on the way can read and change. Write https:; "
            f"http: is allowed only for {', '.join(LOOPBACK)}."
        )
    userinfo, _, netloc = parts.netloc.rpartition("@")
    clean = parts._replace(netloc=netloc, path=parts.path or "/", fragment="")
    return Remote(urlunsplit(clean), unquote(userinfo) if userinfo else None)


def check_step(before: Address, after: Address) -> None:
    """Refuse a redirect, or an entry of a manifest, that leads to a less safe place: from https to http, or to a local file."""
    if isinstance(before, Path):
        return
    if isinstance(after, Path):
        raise BadAddress(f"{before} leads to a local file, {after}. Only a local manifest may name local files.")
    if after.is_plain and not before.is_plain:
        raise BadAddress(f"{before} leads to {after}: from https to plain http, where the bytes could be changed on the way.")


class Broken(Exception):
    """Raised by an attempt that failed for a reason that may pass."""

    def __init__(self, reason: str, *, wait_seconds: float = 0.0, must_restart: bool = False) -> None:
        super().__init__(reason)
        self.wait_seconds, self.must_restart = wait_seconds, must_restart


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a file from `start` on."""

    read: Callable[[int], bytes]
    """Returns at most so many bytes as soon as some are there, and none at the end. Raises Broken."""
    start: int
    """Offset of the first byte: 0 if the server cannot start elsewhere."""
    total: int | None
    """Bytes of the whole file; None if unknown."""
    etag: str | None = None
    """The server's name for this version of the file; None if it gives none."""


@contextlib.contextmanager
def open_at(address: Address, offset: int, etag: str | None, timeout_seconds: float) -> Iterator[Body]:
    """Open an address at an offset; `etag` names the version that earlier bytes came from."""
    if isinstance(address, Path):
        with _open_local(address) as file:
            file.seek(offset)
            yield Body(lambda count: _read_local(file, count, address), offset, os.fstat(file.fileno()).st_size)
        return
    with contextlib.closing(_follow(address, offset, etag, timeout_seconds)) as response:
        yield _body(response, offset, address)


def _open_local(path: Path) -> IO[bytes]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # open() of a pipe would block
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    file = open(handle, "rb")
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return file
    file.close()
    raise DataError(f"{path} is not a plain file.")


def _read_local(file: IO[bytes], count: int, path: Path) -> bytes:
    try:
        return file.read(count)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


class _TimedResponse(http.client.HTTPResponse):
    """Receive all headers within the timeout, which sockets apply to each byte alone."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._sock = sock

    def begin(self) -> None:
        alarm = threading.Timer(self._sock.gettimeout() or 0.0, _hang_up, (self._sock,))
        alarm.daemon = True
        alarm.start()
        try:
            super().begin()
        finally:
            alarm.cancel()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed by the other side already
        # Of socket.socket: the method of a TLS socket would change the object while another thread reads from it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _PlainConnection(http.client.HTTPConnection):
    response_class = _TimedResponse


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _TimedResponse


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_PlainConnection, req)


class _Secure(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req, context=ssl.create_default_context())


def _opener_for(address: Remote) -> urllib.request.OpenerDirector:
    """Make an opener of few handlers: the default one opens ftp:, data: and file: addresses, and follows redirects to them."""
    opener = urllib.request.OpenerDirector()
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor()]
    if address.is_plain:  # of this machine, which a proxy cannot reach
        handlers += [_Plain()]
    else:
        handlers += [urllib.request.ProxyHandler(), _Secure()]
    for handler in handlers:
        opener.add_handler(handler)
    return opener


def _follow(address: Remote, offset: int, etag: str | None, timeout_seconds: float) -> http.client.HTTPResponse:
    here = address
    for _ in range(MAX_REDIRECTS + 1):
        try:
            return _request(here, offset, etag, timeout_seconds)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                location = error.headers.get("Location")
                if error.code not in _REDIRECTS or location is None:
                    raise _refusal(here, error, offset) from None
                here = redirected(here, location)
        except (OSError, http.client.HTTPException) as error:
            if _is_untrusted(error):
                raise DataError(f"{here}: the server's certificate is not trusted: {_reason(error)}.") from None
            raise Broken(_reason(error)) from None
    raise DataError(f"{address} leads on to other addresses more than {MAX_REDIRECTS} times.")


def _request(address: Remote, offset: int, etag: str | None, timeout_seconds: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(address.url, headers={"User-Agent": "fleetx", "Accept-Encoding": "identity"})
    if address.login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(address.login.encode()).decode())
    if offset:
        request.add_header("Range", f"bytes={offset}-")
        if etag is not None and _STRONG_ETAG.fullmatch(etag):
            request.add_header("If-Range", etag)
    response: http.client.HTTPResponse = _opener_for(address).open(request, timeout=timeout_seconds)
    return response


def redirected(before: Remote, location: str) -> Remote:
    """Return the target of a redirect, if it is as safe; a login stays with the host it was given for."""
    try:
        after = parse_address(urljoin(before.url, quote(location, safe=string.punctuation)))
        check_step(before, after)
    except BadAddress as error:
        raise DataError(f"{before}: refused a redirect: {error}") from None
    except ValueError:
        raise DataError(f"{before}: refused a redirect to something that is not an address.") from None
    if isinstance(after, Path):
        raise DataError(f"{before}: refused a redirect to a local file.")
    same_host = urlsplit(before.url)[:2] == urlsplit(after.url)[:2]
    return Remote(after.url, before.login if same_host else None)


def _refusal(address: Remote, error: urllib.error.HTTPError, offset: int) -> Exception:
    known = {status.value: status.phrase for status in http.HTTPStatus}  # the phrase of the server could hold anything
    answer = f"the server answered {error.code} {known.get(error.code, '')}".rstrip()
    if error.code == 416 and offset:
        return Broken(f"{answer}: it has no byte {offset}", must_restart=True)
    if error.code in _RETRIED:
        wait = _NUMBER.fullmatch(error.headers.get("Retry-After", "").strip())
        return Broken(answer, wait_seconds=float(wait[0]) if wait else 0.0)
    return DataError(f"{address}: {answer}.")


def _body(response: http.client.HTTPResponse, offset: int, address: Remote) -> Body:
    def read(count: int) -> bytes:
        try:
            return response.read1(count)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Broken(_reason(error)) from None

    etag, length = response.headers.get("ETag"), response.headers.get("Content-Length", "").strip()
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is None or int(match[1]) != offset:
            raise Broken("the server sent another range than the one asked for", must_restart=True)
        return Body(read, offset, None if match[2] == "*" else int(match[2]), etag)
    if response.status != 200:
        raise DataError(f"{address}: the server answered {response.status}; 200 with the file was expected.")
    return Body(read, 0, int(length) if _NUMBER.fullmatch(length) else None, etag)


def _is_untrusted(error: BaseException) -> bool:
    reason = getattr(error, "reason", None)
    return isinstance(error, ssl.SSLCertVerificationError) or isinstance(reason, ssl.SSLCertVerificationError)


def _reason(error: BaseException) -> str:
    """Describe an error in our own words: texts of the http library can hold the password, or what a server sent."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    if isinstance(cause, TimeoutError):
        return "nothing came for too long"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    if match := _TUNNEL.match(str(cause)):
        return f"the proxy (see https_proxy) answered {match[1]}"
    return f"the connection broke ({type(cause).__name__})"

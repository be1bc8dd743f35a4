"""Manifests and addresses: closed, typed, and refused with the file, the entry and the reason."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fleetx.download.folder import BadName, parts_of
from fleetx.download.manifest import parse_manifest
from fleetx.download.transport import BadAddress, Remote, check_step, parse_address, redirected
from fleetx.errors import DataError
from fleetx.utils import Downloader
from tests.helpers.file_server import answers, row, serving, snapshot

SHA = "ab" * 32
LOCAL = Path("/data/manifest.yaml")
HTTPS = Remote("https://host/data/manifest.yaml")
GOOD = {"path": "a", "size": 1, "sha256": SHA}


def refusal(content: Any, origin: Path | Remote = LOCAL) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(DataError) as caught:
        parse_manifest(raw, origin)
    return str(caught.value)


def entry_refusal(**changes: Any) -> str:
    return refusal({"files": [{key: value for key, value in (GOOD | changes).items() if value is not ...}]})


def test_a_manifest_is_read_alike_from_yaml_and_json() -> None:
    text = f"files:\n  - path: deep/a b.tar\n    size: 12\n    sha256: {SHA.upper()}\n    unpack: true\n"
    (from_yaml,) = parse_manifest(text.encode(), LOCAL)
    rows = [{"path": "deep/a b.tar", "size": 12, "sha256": SHA, "unpack": True}]
    (from_json,) = parse_manifest(b"\xef\xbb\xbf" + json.dumps({"files": rows}).encode(), Path("/data/manifest.json"))
    assert from_yaml == from_json
    assert (from_yaml.path, from_yaml.size, from_yaml.sha256, from_yaml.unpack) == ("deep/a b.tar", 12, SHA, True)
    assert from_yaml.address == Path("/data/deep/a b.tar") and from_yaml.archive_kind == "tar"


def test_without_an_address_a_file_lies_beside_its_manifest() -> None:
    (entry,) = parse_manifest(json.dumps({"files": [GOOD | {"path": "s/ä #.bin"}]}).encode(), Remote("https://h/d/m?x=1", "u:p"))
    assert entry.address == Remote("https://h/d/s/%C3%A4%20%23.bin", "u:p")
    (entry,) = parse_manifest(json.dumps({"files": [GOOD | {"path": "http:/x"}]}).encode(), Remote("https://h/d/m"))
    assert entry.address == Remote("https://h/d/http%3A/x")
    for folder in ("https://h", "https://h/", "https://h/a//b", "https://h/a;v=1/b"):
        (entry,) = parse_manifest(json.dumps({"files": [GOOD]}).encode(), Remote(f"{folder}/m"))
        assert entry.address == Remote(f"{folder}/a")


def test_unknown_keys_are_refused_with_the_one_that_was_meant() -> None:
    assert "line" not in entry_refusal(sha265=SHA)
    assert "file 1: the key 'sha265' is not known; a file has path, size, sha256, url, unpack. Did you mean `sha256`?" in (
        entry_refusal(sha265=SHA)
    )
    assert "Did you mean `files`?" in refusal({"file": []})
    assert "the key 'bos_path' is not known; a manifest has the one key `files`" in refusal({"bos_path": "bos:/x"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": ...}, "path is None"),
        ({"path": 3}, "path is 3"),
        ({"path": ""}, "is empty"),
        ({"path": "/etc/passwd"}, "is absolute"),
        ({"path": "C:/x"}, "is absolute"),
        ({"path": "../x"}, "contains .."),
        ({"path": "a/../x"}, "contains .."),
        ({"path": "a\\b"}, "contains a backslash"),
        ({"path": "a\nb"}, "contains a control character"),
        ({"path": "a\0b"}, "contains a control character"),
        ({"path": "a/"}, "is not plain"),
        ({"path": "./a"}, "is not plain"),
        ({"path": "."}, "is not plain"),
        ({"path": "a//b"}, "is not plain"),
        ({"path": ".fleetx-lock"}, "begins with .fleetx-"),
        ({"path": "x" * 251}, "longer than 250 bytes"),
        ({"path": "a/" * 64 + "a"}, "65 folders deep"),
        ({"size": ...}, "(a): size is None"),
        ({"size": True}, "size is True"),
        ({"size": -1}, "size is -1"),
        ({"size": 1.0}, "size is 1.0"),
        ({"size": "1"}, "size is '1'"),
        ({"size": 2**63}, "size is 9223372036854775808"),
        ({"sha256": ...}, "sha256 is None"),
        ({"sha256": SHA[:-1]}, "64 hexadecimal digits"),
        ({"sha256": SHA + "\n"}, "64 hexadecimal digits"),
        ({"unpack": 1}, "unpack is 1; it must be true or false"),
        ({"unpack": True}, "only names that end in .tar, .tar.gz"),
        ({"url": 3}, "url is a int"),
        ({"url": "elsewhere/a"}, "write the whole address"),
        ({"url": "elsewhere/a:b"}, "write the whole address"),
        ({"url": "http://example.com/a"}, "is plain http"),
        ({"url": "ftp://example.com/a"}, "ftp: are not read"),
        ({"url": "https:///a"}, "names no host"),
    ],
)
def test_each_field_is_checked_and_named(changes: dict[str, Any], words: str) -> None:
    message = entry_refusal(**changes)
    assert words in message and message.startswith("/data/manifest.yaml, file 1")


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a", "a"], "a is given twice"),
        (["a", "a/b"], "a is both a file and the folder of a/b"),
        (["a", "a.part"], "while unfinished"),
    ],
)
def test_two_files_never_want_the_same_place(paths: list[str], words: str) -> None:
    assert words in refusal({"files": [GOOD | {"path": path} for path in paths]})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "holds None"),
        (b"[]", "holds []"),
        (b"files: []", "`files` is []"),
        (b"files: [3]", "file 1 is 3"),
        (b"files: [\n", "line 2 is not YAML"),
        (b"\xff\xfe", "byte 0 is 0xff"),
        (b"files: !!python/object/apply:os.system [id]", "not YAML"),
        (b"files: []\nfiles: []", "given twice"),
        (b"a\x00b", "not YAML"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"files: 2020-13-99", "cannot be read"),
        (b"files: !!timestamp x", "cannot be read"),
        (b"files:\n- &a {path: a}\n- {<<: *a, size: 1}", "it has the alias *'a'; write out each file"),
    ],
)
def test_text_that_is_not_a_manifest_is_refused(raw: bytes, words: str) -> None:
    assert words in refusal(raw)


@pytest.mark.parametrize("bomb", ["[*l{0}, *l{0}]", "{{<<: [*l{0}, *l{0}]}}"])
def test_a_bomb_of_aliases_is_never_built(bomb: str) -> None:
    lines = ["files:", "  - &l0 {k: v}", *(f"  - &l{n} " + bomb.format(n - 1) for n in range(1, 60)), "  - path: *l59"]
    assert "it has the alias *'l0'" in refusal("\n".join(lines).encode())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "line 1 is not JSON"),
        (b'{"files": [], "files": []}', "given twice"),
        (b"[" * 100_000, "nested"),
        (b"9" * 5000, "cannot"),
    ],
)
def test_text_that_is_not_json_is_refused(raw: bytes, words: str) -> None:
    assert words in refusal(raw, Path("/data/manifest.json"))


@pytest.mark.parametrize("path", ["a\ud800", "a\udc80"])
def test_half_of_a_character_is_no_name(path: str) -> None:
    assert "is not Unicode text" in refusal({"files": [GOOD | {"path": path}]}, Path("/data/manifest.json"))


def test_a_remote_manifest_names_no_local_file_and_no_plain_http() -> None:
    assert "Only a local manifest may name local files" in refusal({"files": [GOOD | {"url": "file:///etc/passwd"}]}, HTTPS)
    assert "from https to plain http" in refusal({"files": [GOOD | {"url": "http://localhost/a"}]}, HTTPS)
    (entry,) = parse_manifest(json.dumps({"files": [GOOD | {"url": "http://localhost/a"}]}).encode(), LOCAL)
    assert entry.address == Remote("http://localhost/a")


def test_passwords_do_not_reach_messages() -> None:
    for url in ("http://u:hidden@example.com/?hidden", "https://u:hidden@host:hidden/a", "u@hidden/x", "https://u:hidden@/a"):
        assert "hidden" not in entry_refusal(url=url)
    address = parse_address("https://u:hidden@host:8443/a?hidden#hidden")
    assert isinstance(address, Remote) and address.login == "u:hidden"
    assert str(address) == "https://host:8443/a" and "hidden" not in repr(address)


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/m", "http://localhost/m", "http://[::1]:8080/m", "https://example.com/m"])
def test_plain_http_is_for_this_machine_only(url: str) -> None:
    assert parse_address(url) == Remote(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1.example.com/m",
        "http://localhost@example.com/m",
        "http://10.0.0.1/m",
        "HTTP://example.com/m",
        "https://h /m",
        "https://h:99999/m",
        "https://[::1/m",
        "file://host/m",
        "file:m",
        "file:///a%00b",
        "gopher://h/m",
        "data:,x",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(BadAddress):
        parse_address(url)


def test_a_redirect_never_leads_from_https_to_http_or_to_a_file() -> None:
    assert redirected(HTTPS, "/x y") == Remote("https://host/x%20y")
    assert redirected(Remote("http://localhost/a"), "https://host/b") == Remote("https://host/b")
    for location in ("http://localhost/a", "http://example.com/a", "file:///a", "ftp://x/a", "//[bad/a"):
        with pytest.raises(DataError, match="refused a redirect"):
            redirected(HTTPS, location)
    with pytest.raises(BadAddress):
        check_step(HTTPS, Path("/a"))


def test_a_login_is_kept_on_the_same_host_only() -> None:
    before = Remote("https://host/a", "u:p")
    assert redirected(before, "/b").login == "u:p"
    for location in ("https://other/b", "https://host:444/b", "https://x:y@other/b"):
        assert redirected(before, location).login is None


def test_names_are_split_and_dots_dropped() -> None:
    assert parts_of("./a//b/./c/") == ("a", "b", "c") and parts_of("./") == () and parts_of("a..b/...") == ("a..b", "...")
    for name in ("\u202egnp.exe", "a\x1b[31m", "a\x9b", "a\u2028b"):
        with pytest.raises(BadName, match="control"):
            parts_of(name)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the server's certificate")
def test_https_is_verified_and_its_redirects_to_http_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    downloader, target = Downloader(retries=0, timeout_seconds=10), tmp_path / "target"
    with serving(lambda sock: context.wrap_socket(sock, server_side=True)) as server, serving() as plain:
        manifest = server.publish(a_bin=b"abc")
        with pytest.raises(DataError, match="certificate is not trusted: self-signed certificate"):
            downloader.download(manifest, target)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        plain.files["/a.bin"] = b"abc"
        server.faults["/a.bin"] = [answers(301, Location=f"{plain.url}/a.bin")]
        with pytest.raises(DataError, match="from https to plain http"):
            downloader.download(manifest, target)
        assert plain.requests == [] and snapshot(target) == {}
        server.publish(row("a.bin", b"abc"))
        downloader.download(manifest, target)
    assert snapshot(target) == {"a.bin": b"abc"}

"""Downloads from a real server on this machine, which also cuts connections, lies and stalls."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetx.errors import ConfigError, DataError
from fleetx.utils import Downloader
from tests.helpers.file_server import Handler, Server, answers, row, serving, snapshot
from tests.helpers.limits import within

LIMIT_SECONDS = 60.0

DATA = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


def downloader(**settings: Any) -> Downloader:
    return Downloader(**{"retries": 3, "timeout_seconds": 5, "backoff_seconds": 0.01, **settings})


def failure(manifest: Any, target: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        downloader(**settings).download(manifest, target)
    return str(caught.value)


def write_manifest(folder: Path, *rows: dict[str, Any], name: str = "manifest.yaml") -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps({"files": rows}) if name.endswith("json") else yaml.safe_dump({"files": list(rows)})
    (folder / name).write_text(text)
    return folder / name


# What is brought, and from where


@pytest.mark.parametrize("name", ["manifest.yaml", "manifest.yml", "manifest.json"])
def test_a_folder_a_path_and_a_file_address_bring_the_same_files(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source with space"
    path = write_manifest(source, row("a.bin", DATA), row("deep/b.bin", b"b"), name=name)
    (source / "a.bin").write_bytes(DATA)
    (source / "deep").mkdir()
    (source / "deep" / "b.bin").write_bytes(b"b")
    for number, manifest in enumerate([source, str(source), path, path.as_uri(), source.as_uri()]):
        target = tmp_path / f"target{number}"
        assert downloader().download(manifest, str(target)) == str(target)
        assert snapshot(target) == {"a.bin": DATA, "deep": None, "deep/b.bin": b"b"}


def test_fleets_spelling_brings_the_files_to_the_working_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = server.publish(a_bin=DATA)
    assert downloader().download_from_bos(fs_yaml=manifest) == "./"
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert downloader().download_from_bos(manifest, local_path="./data") == "./data"
    assert (tmp_path / "data" / "a.bin").read_bytes() == DATA


def test_names_are_quoted_in_addresses_and_an_address_of_its_own_is_used(server: Server, tmp_path: Path) -> None:
    server.files["/sub/a%20%23%25.bin"] = b"quoted"
    server.files["/elsewhere"] = b"other"
    manifest = server.publish(row("sub/a #%.bin", b"quoted"), row("b.bin", b"other", url=f"{server.url}/elsewhere"))
    downloader().download(manifest, tmp_path / "t")
    assert snapshot(tmp_path / "t") == {"sub": None, "sub/a #%.bin": b"quoted", "b.bin": b"other"}


def test_an_empty_file_is_a_file(server: Server, tmp_path: Path) -> None:
    downloader().download(server.publish(a_bin=b""), tmp_path / "t")
    assert snapshot(tmp_path / "t") == {"a.bin": b""}


def test_a_complete_folder_is_left_alone_and_nothing_is_asked_for_but_the_manifest(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    downloader().download(manifest, tmp_path)
    before = (tmp_path / "a.bin").stat()
    downloader().download(manifest, tmp_path)
    assert server.count("a.bin") == 1 and server.count("manifest.json") == 2
    assert (tmp_path / "a.bin").stat().st_ino == before.st_ino


def test_a_file_brought_by_other_means_is_hashed_and_kept(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    (tmp_path / "a.bin").write_bytes(DATA)
    downloader().download(manifest, tmp_path)
    assert server.count("a.bin") == 0


def test_a_file_changed_since_it_was_verified_is_brought_again(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    downloader().download(manifest, tmp_path)
    (tmp_path / "a.bin").write_bytes(OTHER)  # the same size
    downloader().download(manifest, tmp_path)
    assert server.count("a.bin") == 2 and (tmp_path / "a.bin").read_bytes() == DATA


def test_a_damaged_record_only_costs_a_second_look(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    downloader().download(manifest, tmp_path)
    for text in ("", "{", "[]", '{"a.bin": 3}', "[" * 100_000, '{"a.bin": {"sha256": 1}}'):
        (tmp_path / ".fleetx-complete.json").write_text(text)
        (tmp_path / ".fleetx-note.json").write_text(text)
        downloader().download(manifest, tmp_path)
    assert server.count("a.bin") == 1


def test_a_finished_folder_that_cannot_be_written_to_is_fine(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = server.publish(a_bin=DATA)
    downloader().download(manifest, tmp_path)

    def read_only(*_: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(
        "fleetx.download.once_per_node.open_to_write", read_only
    )  # root writes everywhere: a real one needs a mount
    assert downloader().download(manifest, tmp_path) == str(tmp_path)
    (tmp_path / "a.bin").unlink()
    assert "cannot be written to: Read-only file system" in failure(manifest, tmp_path)


# Servers and networks that fail


def test_a_cut_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.faults["/a.bin"] = [100_000, 100_000]
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert server.ranges("a.bin") == [None, "bytes=100000-", "bytes=200000-"]
    assert server.bytes_sent["/a.bin"] == len(DATA)


def test_a_second_call_takes_up_what_a_first_one_left(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    server.faults["/a.bin"] = [100_000]
    assert "the connection ended after 100000 of 300000 bytes. Tried once. Run it again" in failure(manifest, tmp_path, retries=0)
    assert snapshot(tmp_path) == {"a.bin.part": DATA[:100_000]}
    downloader().download(manifest, tmp_path)
    assert server.ranges("a.bin")[1:] == ["bytes=100000-"]
    assert snapshot(tmp_path) == {"a.bin": DATA}


def test_a_server_that_ignores_ranges_starts_from_the_first_byte(server: Server, tmp_path: Path) -> None:
    server.ignores_range = True
    server.faults["/a.bin"] = [100_000]
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert server.bytes_sent["/a.bin"] == 400_000


def test_a_server_without_that_range_and_one_that_sends_another_are_asked_for_all(server: Server, tmp_path: Path) -> None:
    for fault in (answers(416), answers(206, DATA[5:], Content_Range="bytes 5-299999/300000"), answers(206, DATA)):
        manifest = server.publish(a_bin=DATA)
        target = tmp_path / str(len(server.requests))
        server.faults["/a.bin"] = [100_000, fault]
        downloader().download(manifest, target)
        assert snapshot(target) == {"a.bin": DATA}
        assert server.ranges("a.bin")[-3:] == [None, "bytes=100000-", None]


def test_a_server_that_cuts_and_has_no_ranges_is_not_asked_for_ever(server: Server, tmp_path: Path) -> None:
    data = bytes(3 * 2**20)
    server.faults["/a.bin"] = [2 * 2**20, answers(416)] * 20  # two MB each time, which are thrown away again
    assert "Tried 4 times" in failure(server.publish(a_bin=data), tmp_path)
    assert server.count("a.bin") == 4


def test_a_file_replaced_on_the_server_between_two_pieces_is_never_glued_together(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)

    def old_piece(handler: Handler) -> None:
        handler.state.files["/a.bin"], handler.state.etags["/a.bin"] = OTHER, '"old"'
        handler.send_file("/a.bin", cut=100_000)
        handler.state.files["/a.bin"], handler.state.etags["/a.bin"] = DATA, '"new"'

    server.faults["/a.bin"] = [old_piece]
    downloader().download(manifest, tmp_path / "with_etag")
    assert server.requests[-1][1]["If-Range"] == '"old"'
    assert snapshot(tmp_path / "with_etag") == {"a.bin": DATA} and server.count("a.bin") == 2


def test_an_etag_that_changes_in_a_partial_answer_starts_again(server: Server, tmp_path: Path) -> None:
    server.etags["/a.bin"] = '"1"'
    server.faults["/a.bin"] = [100_000, answers(206, OTHER[100_000:], Content_Range="bytes 100000-299999/300000", ETag='"2"')]
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert snapshot(tmp_path) == {"a.bin": DATA}
    assert server.ranges("a.bin") == [None, "bytes=100000-", None]


def test_a_left_piece_of_another_version_costs_one_more_try_from_the_first_byte(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(OTHER[:100_000])
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert snapshot(tmp_path) == {"a.bin": DATA}
    assert server.ranges("a.bin") == ["bytes=100000-", None]


@pytest.mark.parametrize("left", [DATA, OTHER, DATA + b"more"])
def test_a_left_piece_as_long_as_the_file_or_longer_is_judged_by_its_hash(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "a.bin.part").write_bytes(left)
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert snapshot(tmp_path) == {"a.bin": DATA}
    assert server.count("a.bin") == (0 if left == DATA else 1)


def test_wrong_bytes_are_named_with_both_digests_and_nothing_stays(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    server.files["/a.bin"] = OTHER
    message = failure(manifest, tmp_path)
    assert message.startswith(f"a.bin: {server.url}/a.bin sent other bytes")
    assert hashlib.sha256(DATA).hexdigest() in message and hashlib.sha256(OTHER).hexdigest() in message
    assert snapshot(tmp_path) == {} and server.count("a.bin") == 1


def test_wrong_bytes_leave_an_older_file_of_that_name_as_it_was(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    server.files["/a.bin"] = OTHER
    (tmp_path / "a.bin").write_bytes(b"older")
    failure(manifest, tmp_path)
    assert snapshot(tmp_path) == {"a.bin": b"older"}


@pytest.mark.parametrize("served", [DATA + b"x", DATA[:-1]])
def test_another_length_than_promised_is_refused_before_a_byte_is_taken(server: Server, tmp_path: Path, served: bytes) -> None:
    manifest = server.publish(a_bin=DATA)
    server.files["/a.bin"] = served
    assert f"has {len(served)} bytes, the manifest says 300000" in failure(manifest, tmp_path)


def test_no_more_than_the_promised_bytes_are_taken_from_a_server_that_never_stops(server: Server, tmp_path: Path) -> None:
    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while handler.send_body(OTHER):
            pass

    server.faults["/a.bin"] = [endless]
    manifest = server.publish(a_bin=DATA)
    assert "sent other bytes" in failure(manifest, tmp_path)
    assert snapshot(tmp_path) == {}


def test_a_stalled_server_is_left_after_the_timeout_and_asked_for_the_rest(server: Server, tmp_path: Path) -> None:
    was_left = threading.Event()

    def stall(handler: Handler) -> None:
        handler.send_file("/a.bin", cut=1000)
        was_left.wait(LIMIT_SECONDS)

    server.faults["/a.bin"] = [stall]
    with within(LIMIT_SECONDS, "the download from a server that stalls"):
        downloader(timeout_seconds=0.2).download(server.publish(a_bin=DATA), tmp_path)
    was_left.set()
    assert server.ranges("a.bin") == [None, "bytes=1000-"]


def test_a_server_that_drips_is_as_good_as_stalled(server: Server, tmp_path: Path) -> None:
    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.send_body(b"x")
            time.sleep(0.02)

    server.faults["/a.bin"] = [drip]
    assert "bytes came in" in failure(server.publish(a_bin=DATA), tmp_path, timeout_seconds=0.2, retries=0)


@pytest.mark.parametrize("piece", [b"x", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_headers_that_never_end_are_as_good_as_none(server: Server, tmp_path: Path, piece: bytes) -> None:
    was_left = threading.Event()

    def endless(handler: Handler) -> None:
        while not was_left.wait(0.02):
            handler.wfile.write(piece)

    server.faults["/a.bin"] = [endless]
    with within(LIMIT_SECONDS, "the download from a server whose headers never end"):
        downloader(timeout_seconds=0.3).download(server.publish(a_bin=DATA), tmp_path)
    was_left.set()
    assert server.count("a.bin") == 2


def test_errors_of_the_server_pass_and_its_wish_to_wait_is_kept(server: Server, tmp_path: Path) -> None:
    server.faults["/manifest.json"] = [answers(500)]
    server.faults["/a.bin"] = [answers(500), answers(503, Retry_After="1")]
    began = time.monotonic()
    downloader().download(server.publish(a_bin=DATA), tmp_path)
    assert snapshot(tmp_path) == {"a.bin": DATA} and time.monotonic() - began >= 1.0


def test_a_server_that_never_recovers_is_given_up_after_the_retries(server: Server, tmp_path: Path) -> None:
    server.faults["/a.bin"] = [answers(500)] * 10
    assert "the server answered 500 Internal Server Error. Tried 4 times" in failure(server.publish(a_bin=DATA), tmp_path)
    assert server.count("a.bin") == 4


@pytest.mark.parametrize(("status", "words"), [(404, "404 Not Found"), (403, "403 Forbidden"), (204, "204"), (599, "599")])
def test_an_answer_that_will_not_change_is_told_at_once(server: Server, tmp_path: Path, status: int, words: str) -> None:
    server.faults["/a.bin"] = [answers(status)]
    message = failure(server.publish(a_bin=DATA), tmp_path)
    assert words in message and message.startswith(f"{server.url}/a.bin: ")
    assert server.count("a.bin") == 1


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with serving() as gone:
        url = gone.url
    assert f"{url}/manifest.json: Connection refused. Tried 2 times" in failure(f"{url}/manifest.json", tmp_path, retries=1)


def test_a_proxy_is_asked_for_https_alone_and_its_refusal_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://user:hidden@127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    downloader().download(server.publish(a_bin=DATA), tmp_path / "plain")
    assert snapshot(tmp_path / "plain") == {"a.bin": DATA}
    monkeypatch.setenv("https_proxy", server.url.replace("//", "//user:hidden@"))
    message = failure("https://localhost/manifest.json", tmp_path / "tls", retries=0)
    assert "the proxy (see https_proxy) answered 501" in message and "hidden" not in message


def test_an_answer_that_is_not_http_is_told(server: Server, tmp_path: Path) -> None:
    def nonsense(handler: Handler) -> None:
        handler.wfile.write(b"\x00\x1b[31mSSH-2.0\r\n\r\n")

    server.faults["/a.bin"] = [nonsense] * 2
    message = failure(server.publish(a_bin=DATA), tmp_path, retries=0)
    assert "the connection broke (BadStatusLine)" in message and "\x1b" not in message


def test_a_manifest_that_never_ends_is_cut_off(server: Server, tmp_path: Path) -> None:
    server.files["/manifest.json"] = b" " * (16 * 2**20 + 1)
    assert "larger than 16777216 bytes" in failure(f"{server.url}/manifest.json", tmp_path)


def test_a_disk_without_room_is_told_before_anything_is_brought(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(row("a.bin", DATA) | {"size": 2**60})
    assert "1048576 TiB are needed" in failure(manifest, tmp_path)
    assert server.count("a.bin") == 0


# Redirects and secrets


def test_redirects_are_followed_with_the_range_and_without_the_password(server: Server, tmp_path: Path) -> None:
    with serving() as mirror:
        mirror.files["/m"] = DATA
        mirror.faults["/m"] = [100_000]
        server.faults["/a.bin"] = [answers(302, Location=f"{mirror.url}/m")] * 2
        manifest = server.publish(a_bin=DATA).replace("http://", "http://user:secret@")
        downloader().download(manifest, tmp_path)
        assert [headers.get("Range") for _, headers in mirror.requests] == [None, "bytes=100000-"]
        assert all("Authorization" not in headers for _, headers in mirror.requests)
    assert all(headers["Authorization"] == "Basic dXNlcjpzZWNyZXQ=" for _, headers in server.requests)
    assert snapshot(tmp_path) == {"a.bin": DATA}


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://example.com/a.bin", "http://example.com/a.bin is plain http"),
        ("file:///etc/passwd", "leads to a local file"),
        ("ftp://example.com/a", "ftp: are not read"),
        ("https://exa mple.com:port/", "cannot be read"),
        ("/a.bin", "more than 10 times"),
    ],
)
def test_a_redirect_to_a_less_safe_place_is_refused(server: Server, tmp_path: Path, location: str, words: str) -> None:
    server.faults["/a.bin"] = [answers(302, Location=location)] * 20
    assert words in failure(server.publish(a_bin=DATA), tmp_path)


def test_passwords_and_queries_are_never_shown(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/manifest.json"] = json.dumps(
        {"files": [row("a.bin", DATA, url=f"{server.url.replace('//', '//u:hidden1@')}/a.bin?sig=hidden2")]}
    ).encode()
    server.faults["/a.bin"] = [answers(500), answers(404)]
    message = failure(f"{server.url.replace('//', '//u:hidden3@')}/manifest.json?token=hidden4#hidden5", tmp_path)
    assert f"{server.url}/a.bin: the server answered 404" in message
    notes = "".join(path.read_text() for path in tmp_path.glob(".fleetx-*"))
    assert "hidden" not in message + notes + "".join(capfd.readouterr())


def test_progress_is_told_in_lines_by_the_first_worker_of_a_node_only(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = server.publish(a_bin=DATA)
    downloader().download(manifest, tmp_path / "first")
    shown = capfd.readouterr().err
    assert f"fleetx: 1 file, 300 kB, from {server.url}/manifest.json into {tmp_path / 'first'}\n" in shown
    assert "fleetx: downloading a.bin, 300 kB\n" in shown
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    downloader().download(manifest, tmp_path / "second")
    assert "".join(capfd.readouterr()) == ""


# Places in the target


def test_a_link_in_the_target_is_not_written_through(server: Server, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "a.bin").write_bytes(b"precious")
    (target / "sub").symlink_to(outside)
    server.files["/sub/a.bin"] = DATA
    assert "sub in the target is a link or a file" in failure(server.publish(row("sub/a.bin", DATA)), target)
    (target / "a.bin").symlink_to(outside / "a.bin")
    (target / "a.bin.part").symlink_to(outside / "a.bin")
    manifest = server.publish(a_bin=DATA)
    assert "a.bin.part in the target is a link" in failure(manifest, target)
    (target / "a.bin.part").unlink()
    downloader().download(manifest, target)
    assert (target / "a.bin").read_bytes() == DATA and not (target / "a.bin").is_symlink()
    assert snapshot(outside) == {"a.bin": b"precious"}


def test_pipes_and_folders_in_the_way_are_named_and_no_download_hangs(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    os.mkfifo(tmp_path / "a.bin.part")
    assert "a.bin.part in the target is a link or not a plain file" in failure(manifest, tmp_path)
    (tmp_path / "a.bin.part").unlink()
    (tmp_path / "a.bin").mkdir()
    assert "a.bin is a folder in the target, but a file in the manifest" in failure(manifest, tmp_path)
    assert server.count("a.bin") == 0
    os.mkfifo(tmp_path / "manifest.yaml")
    assert "is not a plain file" in failure(tmp_path / "manifest.yaml", tmp_path)


def test_what_cannot_be_a_manifest_or_a_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="where there is a file; name a folder"):
        downloader().download(write_manifest(tmp_path / "m", row("a", b"")), tmp_path / "file")
    assert "holds no manifest" in failure(tmp_path, tmp_path)
    assert "cannot be read: No such file" in failure(tmp_path / "missing.yaml", tmp_path)
    write_manifest(tmp_path, row("a", b""), name="manifest.json")
    write_manifest(tmp_path, row("a", b""), name="manifest.yaml")
    assert "name the one to use" in failure(tmp_path, tmp_path)
    for manifest in ("", b"bytes", 3, None, "a\0b", "s3://bucket/manifest.yaml", "http://example.com/manifest.yaml"):
        with pytest.raises(ConfigError, match="manifest"):
            downloader().download(manifest, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"retries": -1},
        {"retries": True},
        {"retries": 2.0},
        {"timeout_seconds": 0},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": "30"},
        {"backoff_seconds": -1.0},
        {"max_unpacked_bytes": 0},
        {"max_files": 1.5},
        {"max_ratio": float("inf")},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Downloader(**settings)

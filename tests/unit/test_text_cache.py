"""The cache of token arrays: built once per node, whole or not at all, never trusted when damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetx.data.text import token_cache
from fleetx.data.text.token_cache import ArrayWriter, Cached, cache_folder, cache_key, cached
from fleetx.errors import ConfigError, DataError, FleetWarning

KEY = cache_key(test=1)
VALUES = np.arange(1000, dtype=np.uint16)


def build(writer: ArrayWriter) -> dict[str, Any]:
    writer.append("tokens", VALUES[:300])
    writer.append("tokens", VALUES[300:])
    writer.append("ends", np.array([300, 1000], dtype=np.int64))
    writer.append("empty", np.zeros(0, dtype=np.int32))
    return {"lines": 2}


def refuse(writer: ArrayWriter) -> dict[str, Any]:
    raise AssertionError("built again")


def check(found: Cached) -> None:
    np.testing.assert_array_equal(found.arrays["tokens"], VALUES)
    assert found.arrays["ends"].tolist() == [300, 1000] and len(found.arrays["empty"]) == 0
    assert found.facts == {"lines": 2}


def test_arrays_are_written_once_and_mapped_afterwards(tmp_path: Path) -> None:
    check(cached(tmp_path, KEY, build, what="arrays"))
    found = cached(tmp_path, KEY, refuse, what="arrays")
    check(found)
    assert isinstance(found.arrays["tokens"], np.memmap) and found.arrays["tokens"].dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["tokens"][0] = 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(writer: ArrayWriter) -> dict[str, Any]:
        writer.append("tokens", VALUES)
        raise DataError("part-0, line 3: bad")

    with pytest.raises(DataError, match="line 3"):
        cached(tmp_path, KEY, fail, what="arrays")
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.lock"]
    check(cached(tmp_path, KEY, build, what="arrays"))


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_shorten, _flip, Path.unlink], ids=["shortened", "one bit", "gone"])
@pytest.mark.parametrize("name", ["tokens.bin", "header.json"])
def test_a_damaged_cache_is_built_again_with_a_warning(tmp_path: Path, name: str, damage: Any) -> None:
    home = cached(tmp_path, KEY, build, what="arrays").folder
    damage(home / name)
    with pytest.warns(FleetWarning, match="are damaged .* built again"):
        check(cached(tmp_path, KEY, build, what="arrays"))
    check(cached(tmp_path, KEY, refuse, what="arrays"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([KEY, f"{KEY}.lock"])


def _large(writer: ArrayWriter) -> dict[str, Any]:
    for start in range(0, 3_000_000, 500_000):
        writer.append("tokens", np.arange(start, start + 500_000, dtype=np.int32))
    return {}


def test_a_bit_in_the_middle_of_a_large_file_counts(tmp_path: Path) -> None:
    home = cached(tmp_path, KEY, _large, what="arrays").folder
    with open(home / "tokens.bin", "r+b") as file:
        file.seek(6_000_000)
        file.write(b"\xff")
    with pytest.warns(FleetWarning, match="tokens.bin has changed since it was written.* built again"):
        found = cached(tmp_path, KEY, _large, what="arrays")
    np.testing.assert_array_equal(found.arrays["tokens"], np.arange(3_000_000))


def test_a_change_that_sets_its_times_back_counts_too(tmp_path: Path) -> None:
    home = cached(tmp_path, KEY, _large, what="arrays").folder
    before = (home / "tokens.bin").stat()
    with open(home / "tokens.bin", "r+b") as file:
        file.seek(6_000_000)
        file.write(b"\xff")
    os.utime(home / "tokens.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.warns(FleetWarning, match="has changed since"):
        cached(tmp_path, KEY, _large, what="arrays")


def test_all_bytes_are_read_once_on_a_node_and_again_after_a_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = token_cache._verify

    def verify(path: Path, sha256: str) -> None:
        read.append(path.name)
        original(path, sha256)

    monkeypatch.setattr(token_cache, "_verify", verify)
    cached(tmp_path, KEY, build, what="arrays")
    assert sorted(read) == ["empty.bin", "ends.bin", "tokens.bin"]
    check(cached(tmp_path, KEY, refuse, what="arrays"))
    assert len(read) == 3
    monkeypatch.setattr(token_cache, "boot_name", lambda: "another start")
    check(cached(tmp_path, KEY, refuse, what="arrays"))
    assert len(read) == 6


@pytest.mark.parametrize("mark", ["", "[]", "[" * 100_000, '{"start": 1}'])
def test_a_mark_that_means_nothing_is_no_mark(tmp_path: Path, mark: str) -> None:
    home = cached(tmp_path, KEY, build, what="arrays").folder
    (path,) = home.glob("checked-*")
    path.write_text(mark)
    _flip(home / "ends.bin")
    with pytest.warns(FleetWarning, match="ends.bin has changed"):
        check(cached(tmp_path, KEY, build, what="arrays"))


@pytest.mark.parametrize("header", ["", "[]", "{}", '{"body": 3, "sha256": "x"}', '{"body": {"arrays": {"../x": {}}}}'])
def test_a_header_that_means_nothing_is_damage_too(tmp_path: Path, header: str) -> None:
    home = cached(tmp_path, KEY, build, what="arrays").folder
    (home / "header.json").write_text(header)
    with pytest.warns(FleetWarning, match="built again"):
        check(cached(tmp_path, KEY, build, what="arrays"))


def test_a_process_that_maps_the_old_arrays_keeps_them_while_they_are_replaced(tmp_path: Path) -> None:
    old = cached(tmp_path, KEY, build, what="arrays")
    (old.folder / "header.json").unlink()
    with pytest.warns(FleetWarning):
        cached(tmp_path, KEY, build, what="arrays")
    check(old)


RACER = """
import sys, time
from pathlib import Path
import numpy as np
from fleetx.data.text import token_cache
from fleetx.data.text.token_cache import cached

folder, key = Path(sys.argv[1]), sys.argv[2]

def build(writer):
    with open(folder / "builds", "a") as file:
        file.write("one\\n")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    writer.append("tokens", np.arange(1000, dtype=np.uint16))
    writer.append("ends", np.array([300, 1000], dtype=np.int64))
    writer.append("empty", np.zeros(0, dtype=np.int32))
    return {"lines": 2}

print(int(cached(folder, key, build, what="the arrays of a test").arrays["tokens"].sum()), flush=True)
"""


def racer(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RACER, str(folder), KEY, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_racing_processes_one_builds_and_the_others_wait_aloud(tmp_path: Path) -> None:
    racers = [racer(tmp_path, 3.5) for _ in range(2)]
    outcomes = [process.communicate(timeout=120) for process in racers]
    assert [out.split()[-1] for out, _ in outcomes] == ["499500", "499500"]
    assert (tmp_path / "builds").read_text() == "one\n"
    assert sum("waiting for the arrays of a test" in errors for _, errors in outcomes) == 1


def test_a_builder_that_is_killed_leaves_the_work_to_the_next(tmp_path: Path) -> None:
    first = racer(tmp_path, 600)
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    first.kill()
    first.communicate(timeout=60)
    check(cached(tmp_path, KEY, build, what="arrays"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([KEY, f"{KEY}.lock", "builds"])


def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "fleetx" / "text"
    assert (tmp_path / "xdg" / "fleetx" / "text").stat().st_mode & 0o777 == 0o700  # tokens of private text stay private
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "fleetx" / "text"
    assert cache_folder(tmp_path / "mine") == tmp_path / "mine"


def test_where_the_users_cache_cannot_be_written_a_temporary_folder_is_used_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # as unwritable for root as for anyone
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(FleetWarning, match="cannot be written .* Pass cache_dir=FOLDER"):
        folder = cache_folder(None)
    assert folder == tmp_path / f"fleetx-{os.getuid()}" / "text"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="cache_dir = .* cannot be written"):
        cache_folder(tmp_path / "file")


def test_a_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"fleetx-{os.getuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="belongs to another user"):
        cache_folder(None)
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_arrays_that_another_user_put_into_a_folder_like_tmp_are_not_read(tmp_path: Path) -> None:
    check(cached(tmp_path, KEY, build, what="arrays"))
    os.chown(tmp_path / KEY, 12345, -1)
    check(cached(tmp_path, KEY, refuse, what="arrays"))  # a folder of ours: users who may write there are trusted
    tmp_path.chmod(0o1777)
    with pytest.warns(FleetWarning, match="another user put them"):
        check(cached(tmp_path, KEY, build, what="arrays"))
    check(cached(tmp_path, KEY, refuse, what="arrays"))


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="lock cannot be opened to lock it .* Pass another cache_dir"):
        cached(tmp_path, KEY, build, what="arrays")
    assert not (tmp_path / "elsewhere").exists()


def test_the_key_depends_on_every_part() -> None:
    assert cache_key(a=1, b=[2, 3]) == cache_key(b=[2, 3], a=1)
    assert len({cache_key(a=1), cache_key(a=2), cache_key(b=1), cache_key(a="1"), cache_key(a=1, b=1)}) == 5

"""Archives, ordinary and hostile ones: all of one is unpacked or nothing, and never anything outside the target."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetx.errors import DataError
from fleetx.utils import Downloader
from tests.helpers.file_server import row, snapshot

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, data: bytes = b"data", **more: Any) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def special(name: str, kind: bytes, target: str = "") -> Member:
    return file(name, b"", type=kind, linkname=target)


def link(name: str, target: str) -> Member:
    return special(name, tarfile.SYMTYPE, target)


def hard(name: str, target: str) -> Member:
    return special(name, tarfile.LNKTYPE, target)


def tar(*members: Member, compress: Callable[[bytes], bytes] = bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return compress(buffer.getvalue())


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def zip_special(name: str, mode: int, data: bytes = b"") -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info, data


class World:
    """A source folder, a target folder, and a neighbour that must never change."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.target = folder, folder / "source", folder / "target"
        self.source.mkdir()
        self.target.mkdir()
        (folder / "neighbour").mkdir()
        (folder / "neighbour" / "precious").write_bytes(b"precious")

    def unpack(self, data: bytes, name: str = "x.tar", **settings: Any) -> dict[str, bytes | None]:
        """What is in the target afterwards, without the archive itself."""
        (self.source / name).parent.mkdir(exist_ok=True)
        (self.source / name).write_bytes(data)
        (self.source / "manifest.json").write_text(json.dumps({"files": [row(name, data, unpack=True)]}))
        Downloader(**settings).download(self.source, self.target)
        found = snapshot(self.target)
        assert found.pop(name) == data
        return found

    def refusal(self, data: bytes, name: str = "x.tar", **settings: Any) -> str:
        """Why an archive is refused; nothing but the archive itself may have changed anywhere."""
        before = snapshot(self.folder)
        with pytest.raises(DataError) as caught:
            self.unpack(data, name, **settings)
        after = snapshot(self.folder)
        for path in (f"source/{name}", f"target/{name}", "source/manifest.json"):
            before.pop(path, None)
            after.pop(path, None)
        assert after == before
        assert not [path for path in self.target.iterdir() if path.name.startswith(".fleetx-unpacking")]
        return str(caught.value)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# Ordinary archives


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("x.tar", bytes),
        ("x.tar.gz", gzip.compress),
        ("x.TGZ", gzip.compress),
        ("x.tar.xz", lzma.compress),
        ("x.txz", lzma.compress),
    ],
)
def test_tars_of_all_kinds_are_unpacked(world: World, name: str, compress: Callable[[bytes], bytes]) -> None:
    long = "long/" + "n" * 200
    members = (special("./", tarfile.DIRTYPE), file("./a.txt", b"a" * 100_000), special("d", tarfile.DIRTYPE), file("d/b", b""))
    assert world.unpack(tar(*members, file(long), compress=compress), name) == {
        "a.txt": b"a" * 100_000,
        "d": None,
        "d/b": b"",
        "long": None,
        long: b"data",
    }


def test_a_zip_is_unpacked(world: World) -> None:
    data = zipped(("a.txt", b"a" * 100_000), ("d/", b""), ("e/f.txt", b"f"))
    assert world.unpack(data, "x.zip") == {"a.txt": b"a" * 100_000, "d": None, "e": None, "e/f.txt": b"f"}


def test_an_xz_of_several_streams_is_one_tar(world: World) -> None:
    whole = tar(file("a", b"a" * 3000))
    data = lzma.compress(whole[:1000]) + bytes(8) + lzma.compress(whole[1000:])
    assert world.unpack(data, "x.tar.xz") == {"a": b"a" * 3000}


def test_an_archive_in_a_folder_is_unpacked_beside_itself(world: World) -> None:
    assert world.unpack(tar(file("a")), "deep/x.tar") == {"deep": None, "deep/a": b"data"}


def test_links_that_stay_inside_are_made(world: World) -> None:
    members = (link("early", "d/a"), file("d/a"), link("d/up", "../d"), hard("same", "d/a"), link("chain", "d/up/a"))
    found = world.unpack(tar(*members))
    assert found == {"early": b"d/a", "d": None, "d/a": b"data", "d/up": b"../d", "same": b"data", "chain": b"d/up/a"}
    assert (world.target / "chain").read_bytes() == b"data"


def test_rights_are_those_of_new_files_and_no_setuid_bit_survives(world: World) -> None:
    mask = os.umask(0o022)
    try:
        world.unpack(tar(file("plain", mode=0o6666), file("tool", mode=0o7755), special("d", tarfile.DIRTYPE)))
    finally:
        os.umask(mask)
    modes = {name: stat.S_IMODE((world.target / name).stat().st_mode) for name in ("plain", "tool", "d")}
    assert modes == {"plain": 0o644, "tool": 0o755, "d": 0o755}


def test_folders_are_joined_and_files_replaced(world: World) -> None:
    (world.target / "d" / "mine").mkdir(parents=True)
    (world.target / "d" / "mine" / "kept").write_bytes(b"kept")
    (world.target / "d" / "a").write_bytes(b"older")
    found = world.unpack(tar(file("d/a"), file("d/mine/b")))
    assert found == {"d": None, "d/a": b"data", "d/mine": None, "d/mine/b": b"data", "d/mine/kept": b"kept"}


def test_it_is_unpacked_once_and_again_when_something_of_it_is_gone(world: World) -> None:
    data = tar(file("a"), file("d/b"))
    world.unpack(data)
    before = (world.target / "a").stat().st_ino
    world.unpack(data)
    assert (world.target / "a").stat().st_ino == before
    (world.target / "a").unlink()
    assert world.unpack(data) == {"a": b"data", "d": None, "d/b": b"data"}


def test_what_a_killed_process_left_aside_is_removed(world: World) -> None:
    left = world.target / f".fleetx-unpacking-{'0' * 32}"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    (world.target / f".fleetx-{'1' * 32}").write_text("{")
    world.unpack(tar(file("a")))
    assert sorted(path.name for path in world.target.iterdir()) == sorted(
        [".fleetx-complete.json", ".fleetx-lock", ".fleetx-note.json", "a", "x.tar"]
    )


# Hostile tars


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([file("../evil")], "the member '../evil' contains .."),
        ([file("d/../../evil")], "contains .."),
        ([file("/evil")], "is absolute"),
        ([special("../evil", tarfile.DIRTYPE)], "contains .."),
        ([special("/tmp/evil", tarfile.DIRTYPE)], "is absolute"),
        ([file("a\nb")], "contains a control character"),
        ([file("a\\b")], "contains a backslash"),
        ([file(".fleetx-complete.json")], "begins with .fleetx-"),
        ([file("d/.fleetx-lock")], "begins with .fleetx-"),
        ([file("x.tar")], "would replace a file of the manifest"),
        ([file("a"), file("a")], "'a' is there twice"),
        ([file("a"), file("./a")], "is there twice"),
        ([file("a"), file("a/b")], "needs the folder 'a', which is also a file"),
        ([file("a/b"), file("a")], "is there twice"),
        ([file("./")], "'./' is a file without a name"),
        ([file("a/" * 65 + "a")], "66 folders deep"),
        ([file("n" * 300)], "longer than 250 bytes"),
        ([special("a", tarfile.FIFOTYPE)], "is a pipe"),
        ([special("a", tarfile.CHRTYPE)], "is a device"),
        ([special("a", tarfile.BLKTYPE)], "is a device"),
        ([special("a", b"Z")], "of the unknown kind b'Z'"),
        ([link("a", "/etc/passwd")], "links must stay inside the archive"),
        ([link("a", "../../neighbour/precious")], "links must stay inside the archive"),
        ([link("a", "../x.tar")], "links must stay inside the archive"),
        ([link("a", "../neighbour/precious")], "which is not in the archive"),
        ([link("a", "..")], "links must stay inside the archive"),
        ([link("a", "missing")], "which is not in the archive"),
        ([link("a", "a")], "which is not in the archive"),
        ([link("a", "b"), link("b", "a")], "which is not in the archive"),
        ([link("a", "")], "is a link without a usable target"),
        ([link("a", "../neighbour"), file("a/evil")], "is there twice, once as a link"),
        ([special("d", tarfile.DIRTYPE), link("a", "d"), file("a/evil")], "is there twice, once as a link"),
        ([link("a/b/c", "../.."), link("m", "a/b/c/../x")], "which is not in the archive"),
        ([link("a/b/c", "../.."), link("m", "a/b/c/../../neighbour/precious")], "links must stay inside the archive"),
        ([file("a"), hard("b", "../neighbour/precious")], "which contains .."),
        ([hard("b", "/etc/passwd")], "which is absolute"),
        ([hard("b", "later"), file("later")], "is not a file that came before it"),
        ([link("l", "../neighbour/precious"), hard("b", "l")], "is not a file that came before it"),
        ([file("a"), hard("a", "a")], "is there twice"),
        ([link(f"l{n}", f"l{n + 1}") for n in range(100)] + [file("l100")], "which is not in the archive"),
    ],
)
def test_a_hostile_tar_is_refused_by_its_member_and_changes_nothing(world: World, members: list[Member], words: str) -> None:
    message = world.refusal(tar(file("fine"), *members))
    assert words in message and message.startswith("x.tar") and message.endswith("Nothing of it was unpacked.")


def test_a_name_with_a_nul_is_refused(world: World) -> None:
    member = file("a")
    member[0].pax_headers = {"path": "a\0b"}
    assert "contains a control character" in world.refusal(tar(member))


def test_a_link_in_the_target_is_not_followed_by_an_archive(world: World) -> None:
    (world.target / "d").symlink_to(world.folder / "neighbour")
    assert "d in the target is not a folder" in world.refusal(tar(file("fine"), file("d/precious")))
    (world.target / "d").unlink()
    (world.target / "a").symlink_to(world.folder / "neighbour" / "precious")
    assert world.unpack(tar(file("a"))) == {"a": b"data"}
    assert (world.folder / "neighbour" / "precious").read_bytes() == b"precious"


def test_what_is_in_the_way_in_the_target_is_named_before_anything_is_moved(world: World) -> None:
    (world.target / "b" / "c").mkdir(parents=True)
    (world.target / "f").write_bytes(b"mine")
    assert "b/c in the target is a folder" in world.refusal(tar(file("a"), file("b/c")))
    assert "f in the target is not a folder" in world.refusal(tar(file("a"), file("f/x")))


def test_limits_on_bytes_and_files_count_everything(world: World) -> None:
    data = tar(file("a", bytes(1000)), file("d/b", bytes(1000)))
    assert "'d/b' would make more than max_unpacked_bytes=1999" in world.refusal(data, max_unpacked_bytes=1999)
    assert "'d/b' would make more than max_files=2 files and folders" in world.refusal(data, max_files=2)
    assert world.unpack(data, max_unpacked_bytes=2000, max_files=3) == {"a": bytes(1000), "d": None, "d/b": bytes(1000)}


def test_a_huge_claimed_size_is_refused_without_writing_it(world: World) -> None:
    data = bytearray(tar(file("a", b"")))
    info = tarfile.TarInfo("a")
    info.size = 2**50
    data[:512] = info.tobuf(tarfile.GNU_FORMAT)
    assert "max_unpacked_bytes" in world.refusal(bytes(data))
    info.size = 2**30
    data[:512] = info.tobuf(tarfile.GNU_FORMAT)
    assert "is not a readable tar file" in world.refusal(bytes(data))


def test_a_bomb_is_stopped_by_what_really_comes_out(world: World) -> None:
    bomb = tar(*(file(f"{n}", bytes(2**20)) for n in range(80)), compress=lambda data: gzip.compress(data, 1))
    assert len(bomb) < 500_000
    assert "unpacks to more than 67108864 bytes, far more than its size lets expect" in world.refusal(
        bomb, "x.tar.gz", max_ratio=10
    )


def test_a_bomb_in_a_header_does_not_fill_the_memory(world: World) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 60 * 2**20
    data = gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(info.size), 1)
    assert "has headers of more than 2097152 bytes" in world.refusal(data, "x.tar.gz")


def header(name: str, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def extended(kind: bytes, **keys: str) -> bytes:
    """An extended header of a member (x) or of all that follow (g)."""
    text = b"".join(b"%d %s=%s\n" % (len(key + value) + 5, key.encode(), value.encode()) for key, value in keys.items())
    assert all(10 <= len(key + value) + 5 < 100 for key, value in keys.items())
    return header("x", len(text), kind) + text + bytes(-len(text) % 512)


def test_a_chain_of_headers_is_no_recursion_error(world: World) -> None:
    for chained in (
        header("x", 1, tarfile.GNUTYPE_LONGNAME) + bytes(512),
        extended(b"x", comment="c"),
        extended(b"g", comment="c"),
    ):
        assert "is not a readable tar file" in world.refusal(chained * 1200 + tar(file("a")))


def test_a_map_of_endless_holes_is_not_read(world: World) -> None:
    keys = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    data = gzip.compress(extended(b"x", **keys) + header("a", 0, b"0") + b"9000000\n" + b"0\n" * 2_000_000, 1)
    assert "has headers of more than 2097152 bytes" in world.refusal(data, "x.tar.gz")


def test_global_headers_that_pile_up_are_refused(world: World) -> None:
    piles = [extended(b"g", **{f"key{n:03}{i:03}": "" for i in range(50)}) + header(f"f{n}", 0, b"0") for n in range(3)]
    assert world.unpack(b"".join(piles[:2]) + bytes(1024)) == {"f0": b"", "f1": b""}
    assert "has more than 100 keys in its global headers" in world.refusal(b"".join(piles) + bytes(1024))


def test_two_tars_joined_are_not_unpacked_by_half(world: World) -> None:
    assert "goes on after its end mark" in world.refusal(tar(file("a")) + tar(file("b")))


def test_sparse_files_are_refused(world: World) -> None:
    member = file("a", b"x", type=tarfile.GNUTYPE_SPARSE)
    assert "'a' is a sparse file" in world.refusal(tar(member))


def test_an_xz_that_asks_for_too_much_memory_is_refused(world: World) -> None:
    data = bytearray(lzma.compress(tar(file("a")), preset=0))
    assert data[12:16] == b"\x02\x00\x21\x01"  # the block's header: LZMA2, then one byte that gives the dictionary's size
    data[16] = 40  # 4 GiB
    data[20:24] = struct.pack("<I", zlib.crc32(bytes(data[12:20])))
    assert "Memory usage limit exceeded" in world.refusal(bytes(data), "x.tar.xz")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda data: data[:1024], "x.tar"),  # at a member's end: nothing is missing but the end mark
        (lambda data: data[:700], "x.tar"),
        (lambda data: data[:1024] + b"garbage" * 200, "x.tar"),
        (lambda data: b"", "x.tar"),
        (lambda data: b"garbage" * 200, "x.tar"),
        (lambda data: bytes(512), "x.tar.gz"),
        (lambda data: gzip.compress(data)[:-20], "x.tar.gz"),
        (lambda data: lzma.compress(data)[:-40], "x.tar.xz"),
        (lambda data: gzip.compress(data), "x.tar"),
        (lambda data: data, "x.zip"),
        (lambda data: b"", "x.zip"),
    ],
)
def test_a_damaged_archive_is_refused_whole(world: World, damage: Callable[[bytes], bytes], name: str) -> None:
    message = world.refusal(damage(tar(file("a", b"a" * 100), file("b", os.urandom(2000)))), name)
    assert "is not a readable" in message or "breaks off" in message


# Hostile zips


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("../evil", b""), "contains .."),
        (("/evil", b""), "is absolute"),
        (("C:/evil", b""), "is absolute"),
        (("..\\evil", b""), "contains a backslash"),
        (("a\nb", b""), "contains a control character"),
        (("x.zip", b""), "would replace a file of the manifest"),
        (zip_special("a", stat.S_IFLNK | 0o777, b"../x.zip"), "links must stay inside"),
        (zip_special("a", stat.S_IFLNK | 0o777, b"../neighbour/precious"), "not in the archive"),
        (zip_special("a", stat.S_IFLNK | 0o777, b"/etc/passwd"), "links must stay inside"),
        (zip_special("a", stat.S_IFLNK | 0o777, b"x" * 5000), "without a usable target"),
        (zip_special("a", stat.S_IFIFO | 0o666), "is a device, a pipe or the like"),
        (zip_special("a", stat.S_IFCHR | 0o666), "is a device, a pipe or the like"),
        (("fine", b""), "is there twice"),
    ],
)
def test_a_hostile_zip_is_refused_by_its_member_and_changes_nothing(world: World, member: Any, words: str) -> None:
    with pytest.warns(UserWarning) if member[0] == "fine" else pytest.MonkeyPatch.context():
        data = zipped(("fine", b""), member)
    assert words in world.refusal(data, "x.zip")


def test_a_link_inside_a_zip_is_made(world: World) -> None:
    assert world.unpack(zipped(("a", b"data"), zip_special("l", stat.S_IFLNK | 0o777, b"a")), "x.zip") == {
        "a": b"data",
        "l": b"a",
    }


def test_a_zips_name_with_a_nul_is_refused(world: World) -> None:
    assert "contains a control character" in world.refusal(zipped(("aXb", b"")).replace(b"aXb", b"a\0b"), "x.zip")


def test_a_zips_claims_are_not_believed(world: World) -> None:
    data = zipped(("a", bytes(100_000)))
    size = struct.pack("<I", 100_000)
    assert data.count(size) == 2
    for claimed in (1000, 200_000):
        message = world.refusal(data.replace(size, struct.pack("<I", claimed)), "x.zip")
        assert "is not a readable zip file at 'a'" in message or "ends after 100000 of 200000 bytes" in message
    assert "max_unpacked_bytes" in world.refusal(data, "x.zip", max_unpacked_bytes=99_999)


def test_a_zip_bomb_is_stopped_by_what_really_comes_out(world: World) -> None:
    bomb = zipped(*((str(n), bytes(2**20)) for n in range(80)))
    assert "is more than 67108864 bytes in all" in world.refusal(bomb, "x.zip")


def test_a_bomb_in_the_target_of_a_zips_link_does_not_fill_the_memory(world: World) -> None:
    data = bytearray(zipped(zip_special("l", stat.S_IFLNK | 0o777, bytes(64 * 2**20))))
    struct.pack_into("<I", data, data.index(b"PK\1\2") + 24, 10)  # claimed: ten bytes
    tracemalloc.start()
    try:
        assert "x.zip is not a readable zip file at 'l'" in world.refusal(bytes(data), "x.zip")
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_encrypted_zips_and_odd_methods_are_refused(world: World) -> None:
    data = zipped(("a", b"data"))
    local, listed = data.index(b"PK\3\4"), data.index(b"PK\1\2")
    encrypted, odd = bytearray(data), bytearray(data)
    encrypted[local + 6] |= 1
    encrypted[listed + 8] |= 1
    odd[local + 8] = odd[listed + 10] = 14
    assert "is encrypted" in world.refusal(bytes(encrypted), "x.zip")
    assert "method 14" in world.refusal(bytes(odd), "x.zip")

"""Where the bytes of images come from: folders and archives, friendly and hostile."""

import gzip
import io
import os
import tarfile

import pytest

from fleetx.data.images.files import Archive, FolderFiles, open_folder, open_tar, read_regular_file
from fleetx.data.images.image_list import parse_image_list
from fleetx.errors import DataError
from tests.helpers.limits import within


def listed(*names):
    return parse_image_list("".join(f"{name} 0\n" for name in names).encode(), "train.txt")


def make_tar(path, members, format=tarfile.GNU_FORMAT):
    """Members: name -> bytes, or a TarInfo made ready."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return str(path)


def special(name, type, **fields):
    info = tarfile.TarInfo(name)
    info.type = type
    for field, value in fields.items():
        setattr(info, field, value)
    return name, info


def test_a_folder_is_read_relative_to_the_list_or_below_the_split(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jpg").write_bytes(b"in train")
    assert open_folder(listed("train/a.jpg"), str(tmp_path), "train").read(0) == b"in train"
    assert open_folder(listed("a.jpg"), str(tmp_path), "train").read(0) == b"in train"
    (tmp_path / "a.jpg").write_bytes(b"at the top")
    assert open_folder(listed("a.jpg"), str(tmp_path), "train").read(0) == b"at the top"


def test_a_list_whose_images_are_nowhere_names_both_places(tmp_path):
    with pytest.raises(DataError, match=r"^train.txt, line 1: there is neither '.*/a.jpg' nor '.*/train/a.jpg'"):
        open_folder(listed("a.jpg", "b.jpg"), str(tmp_path), "train")
    path = make_tar(tmp_path / "x.tar", [("b.jpg", b"b")])
    with pytest.raises(DataError, match=r"^train.txt, line 1: there is neither .*x.tar: 'a.jpg' nor 'train/a.jpg'"):
        open_tar(listed("a.jpg"), Archive(path), b"", "train")


def test_the_first_image_may_be_missing(tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"b")
    files = open_folder(listed("a.jpg", "b.jpg"), str(tmp_path), "train")
    assert files.read(1) == b"b"
    with pytest.raises(DataError, match="No such file or directory"):
        files.read(0)


def test_links_in_a_folder_are_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"linked")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jpg").symlink_to(tmp_path / "elsewhere")
    assert FolderFiles(listed("a.jpg"), os.fsencode(tmp_path / "set")).read(0) == b"linked"


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in [("fifo", "not a regular file"), ("folder", "not a reg"), ("zero", "not a reg"), ("loop", "symbolic")]:
        with within(60, f"refusing a {name}"), pytest.raises(DataError, match=reason):
            read_regular_file(str(tmp_path / name), 100)


def test_files_that_are_empty_or_too_large_are_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "large").write_bytes(b"x" * 101)
    with pytest.raises(DataError, match="the file is empty"):
        read_regular_file(str(tmp_path / "empty"), 100)
    with pytest.raises(DataError, match="has 101 bytes; allowed are 100"):
        read_regular_file(str(tmp_path / "large"), 100)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_found_by_name_in_every_format(tmp_path, format):
    long = "/".join(["d" * 30] * 5) + "/ä.jpg"
    names = ["./a.jpg", "train/b.jpg", "two words.jpg"] + ([long] if format != tarfile.USTAR_FORMAT else [])
    path = make_tar(tmp_path / "x.tar", [(name, name.encode() * 300) for name in names], format)
    files = open_tar(listed("a.jpg", *names[1:]), Archive(path), b"", "train")
    assert [files.read(i) for i in range(len(names))] == [name.encode() * 300 for name in names]


def test_a_member_below_the_split_is_found_too(tmp_path):
    path = make_tar(tmp_path / "x.tar", [("set/train/a.jpg", b"a")])
    assert open_tar(listed("a.jpg"), Archive(path), b"set/", "train").read(0) == b"a"


def test_of_two_members_of_one_name_the_last_counts_as_when_unpacking(tmp_path):
    path = make_tar(
        tmp_path / "x.tar", [("a.jpg", b"old"), ("a.jpg", b"new"), ("b.jpg", b"b"), special("b.jpg", tarfile.SYMTYPE)]
    )
    files = open_tar(listed("a.jpg", "b.jpg"), Archive(path), b"", "train")
    assert files.read(0) == b"new"
    with pytest.raises(DataError, match="a link in the archive, and only plain files are read"):
        files.read(1)


NEVER_READ = {
    "symbolic link": special("x", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": special("x", tarfile.LNKTYPE, linkname="a.jpg"),
    "device": special("x", tarfile.CHRTYPE, devmajor=1, devminor=5),
    "block device": special("x", tarfile.BLKTYPE),
    "FIFO": special("x", tarfile.FIFOTYPE),
    "folder": special("x", tarfile.DIRTYPE),
    "sparse file": special("x", tarfile.GNUTYPE_SPARSE),
    "unknown type": special("x", b"Q"),
}


@pytest.mark.parametrize("member", NEVER_READ.values(), ids=NEVER_READ)
def test_only_plain_members_are_read(tmp_path, member):
    path = make_tar(tmp_path / "x.tar", [("a.jpg", b"a"), member])
    files = open_tar(listed("a.jpg", "x"), Archive(path), b"", "train")
    assert files.read(0) == b"a"
    with pytest.raises(DataError, match="in the archive, and only plain files are read from one"):
        files.read(1)


def test_members_that_point_out_of_the_archive_match_nothing(tmp_path):
    path = make_tar(tmp_path / "x.tar", [("ok", b"ok"), ("../a.jpg", b"out"), ("sub/../b.jpg", b"out"), ("/c.jpg", b"out")])
    files = open_tar(listed("ok", "a.jpg", "b.jpg", "c.jpg"), Archive(path), b"", "train")
    for index in (1, 2, 3):
        with pytest.raises(DataError, match="x.tar has no such member"):
            files.read(index)


PACKED = {"gunzip": gzip.compress(b"x"), "bunzip2": b"BZh91AY&SY", "unxz": b"\xfd7zXZ\0..", "unzstd": b"(\xb5/\xfd...."}


@pytest.mark.parametrize("command,packed", PACKED.items(), ids=PACKED)
def test_a_compressed_archive_is_refused_with_the_command_to_run(tmp_path, packed, command):
    (tmp_path / "x.tar.z").write_bytes(packed)
    with pytest.raises(DataError, match=f"x.tar.z is compressed.*run `{command}"):
        Archive(str(tmp_path / "x.tar.z"))


def raw_header(name, size_field, type=b"0"):
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108], block[108:116], block[116:124], block[136:148] = b"0000644\0", b"0000000\0", b"0000000\0", b"00000000000\0"
    block[124:136], block[156:157], block[257:265] = size_field, type, b"ustar\x0000"
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def octal(size):
    return b"%011o\0" % size


def base256(size):
    return (b"\xff" if size < 0 else b"\x80") + size.to_bytes(11, "big", signed=True)


def pax(type, records):
    return raw_header(b"pax", octal(len(records)), type) + records + bytes(-len(records) % 512)


GOOD = raw_header(b"a.jpg", octal(3)) + b"abc".ljust(512, b"\0")
END = bytes(1024)
PAX_RECORD = b"24 size=99999999999999999\n"
DAMAGED = {
    "nothing": b"",
    "text": b"no archive " * 100,
    "a size beyond the end": GOOD + raw_header(b"b.jpg", octal(10**6)) + END,
    "a size of exabytes": GOOD + raw_header(b"b.jpg", base256(2**62)) + END,
    "a negative size": GOOD + raw_header(b"b.jpg", base256(-512)) + END,
    "a large negative size": GOOD + raw_header(b"b.jpg", base256(-(2**40))) + END,
    "a long name of a terabyte": GOOD + raw_header(b"././@LongLink", base256(2**40), b"L") + END,
    "a long name of negative length": GOOD + raw_header(b"././@LongLink", base256(-(2**40)), b"L") + END,
    "a PAX header of a gigabyte": GOOD + raw_header(b"pax", octal(2**30), b"x") + END,
    "a PAX size of petabytes": GOOD
    + raw_header(b"pax", octal(len(PAX_RECORD)), b"x")
    + PAX_RECORD.ljust(512, b"\0")
    + raw_header(b"b.jpg", octal(3))
    + b"abc".ljust(512, b"\0")
    + END,
    "a PAX header for nothing": GOOD + raw_header(b"pax", octal(0), b"x"),
    "PAX headers without end": GOOD + raw_header(b"pax", octal(0), b"x") * 3000 + END,
    "a map of holes without end": GOOD
    + pax(b"x", b"22 GNU.sparse.major=1\n" + b"22 GNU.sparse.minor=0\n" + b"25 GNU.sparse.realsize=9\n")
    + raw_header(b"b.jpg", octal(0))
    + b"9000000\n"
    + b"0\n" * 600_000,
    "global headers that pile up": b"".join(
        pax(b"g", b"".join(b"11 k%03d%02d=\n" % (n, i) for i in range(40))) + raw_header(b"%d.jpg" % n, octal(0))
        for n in range(3)
    )
    + END,
    "cut in the data": GOOD + raw_header(b"b.jpg", octal(600)) + bytes(512),
    "cut in a header": GOOD + raw_header(b"b.jpg", octal(3))[:300],
    "a damaged header in the middle": GOOD + b"\xff" * 512 + GOOD + END,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_archive_is_refused_by_name_and_at_once(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    with within(60, "refusing the archive"), pytest.raises(DataError, match="x.tar"):
        Archive(str(tmp_path / "x.tar"))


def test_a_list_in_an_archive_has_a_limit_too(tmp_path):
    size = 2 * 2**30 + 1
    (tmp_path / "x.tar").write_bytes(raw_header(b"train.txt", base256(size)))
    os.truncate(tmp_path / "x.tar", 512 + size + 511 + 1024)  # a file of holes: it takes no room
    with pytest.raises(DataError, match="x.tar: 'train.txt': 2147483649 bytes, and a list may have 2147483648"):
        Archive(str(tmp_path / "x.tar")).read(b"train.txt")


def test_an_archive_without_its_final_zeros_is_read(tmp_path):
    (tmp_path / "x.tar").write_bytes(GOOD)
    assert Archive(str(tmp_path / "x.tar")).read(b"a.jpg") == b"abc"


def test_an_archive_that_shrinks_later_is_noticed(tmp_path):
    path = make_tar(tmp_path / "x.tar", [("a.jpg", b"a" * 5000)])
    archive = Archive(path)
    os.truncate(path, 3000)
    with pytest.raises(DataError, match="x.tar now ends in the middle of this member"):
        archive.read(b"a.jpg")


def test_an_archive_that_is_missing_or_a_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="fifo is not a regular file; expected a folder or an uncompressed .tar"):
        Archive(str(tmp_path / "fifo"))
    with pytest.raises(DataError, match="none: No such file or directory; expected a folder or an uncompressed .tar"):
        Archive(str(tmp_path / "none"))


def test_ten_thousand_members_are_indexed_quickly(tmp_path):
    path = make_tar(tmp_path / "x.tar", [(f"{i}.jpg", b"%d" % i) for i in range(10_000)])
    with within(60, "the index of ten thousand members"):
        archive = Archive(path)
    assert archive.read(b"9999.jpg") == b"9999"

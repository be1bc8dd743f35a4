"""A corpus of bad inputs, each in a training loop on two real ranks, with and without workers.

Each must be a `DataError` that names the file and, where there is one, the line; the same on both ranks, soon, and with nothing
written into the data's folder. Each case has a data set of its own.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import signal
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import fleetx as X
from fleetx import fleet
from fleetx.dist import world
from tests.helpers.bad_images import REFUSED
from tests.helpers.data_ranks import TINY_BERT, pack, run_job, write_digital, write_images, write_prose
from tests.helpers.harness import raised
from tests.helpers.launchers import launchers, wait_until

IMAGES = 12
SECONDS = 60.0

LISTS = {
    "a line without label": ("a.jpg\n", "line 1: expected `relative/path label`, got 'a.jpg'"),
    "a label alone": ("train/0.jpg 0\n 3\n", "line 2: "),
    "an empty line": ("train/0.jpg 0\n\ntrain/1.jpg 1\n", "line 2: .*an empty line"),
    "a label out of range": ("train/0.jpg 0\ntrain/1.jpg 10\n", "line 2: the label must be an integer from 0 to 9, got '10'"),
    "a negative label": ("train/0.jpg -1\n", "line 1: the label must be"),
    "a label with a point": ("train/0.jpg 1.0\n", "line 1: the label must be"),
    "a label of other digits": ("train/0.jpg ٣\n", "line 1: the label must be"),
    "a label of 400 digits": (f"train/0.jpg {'9' * 400}\n", "line 1: the label must be"),
    "a path that goes up": ("train/0.jpg 0\n../secret.jpg 1\n", r"line 2: .*`\.\.`"),
    "a path that goes up in its middle": ("train/../../secret.jpg 1\n", r"line 1: .*`\.\.`"),
    "an absolute path": ("/etc/passwd 1\n", "line 1: .*absolute"),
    "Windows line ends": ("train/0.jpg 0\r\ntrain/1.jpg 1\r\n", "line 1: .*carriage return"),
    "a byte order mark": ("\ufefftrain/0.jpg 0\n", "line 1: .*byte order mark"),
    "a NUL byte": ("train/0.jpg 0\ntrain/\0.jpg 1\n", "line 2: .*NUL"),
    "Latin-1": (b"train/0.jpg 0\ntrain/\xe9.jpg 1\n", "line 2: .*not UTF-8"),
    "an empty list": ("", "empty"),
    "nothing but a line end": ("\n", "line 1: "),
}
LINES = {
    "no label": ("2 5 3 6 3;0 0 0 1 1;0 1 2 3 4\n", "has 3 fields; 4 are needed"),
    "a label of 2": ("2 5 3 6 3;0 0 0 1 1;0 1 2 3 4;2\n", "label is '2'"),
    "an empty label": ("2 5 3 6 3;0 0 0 1 1;0 1 2 3 4;\n", "label holds ''"),
    "a token beyond the vocabulary": ("2 5 3 200 3;0 0 0 1 1;0 1 2 3 4;1\n", "token id 200 is not in the vocabulary"),
    "a negative token": ("2 -5 3 6 3;0 0 0 1 1;0 1 2 3 4;1\n", "token_ids holds '-5'"),
    "fewer positions than tokens": ("2 5 3 6 3;0 0 0 1 1;0 1 2 3;1\n", "equally many"),
    "a number of 400 digits": (f"2 {'5' * 400} 3 6 3;0 0 0 1 1;0 1 2 3 4;1\n", "token_ids holds"),
    "an empty line": ("\n", "is empty"),
    "Windows line ends": ("2 5 3 6 3;0 0 0 1 1;0 1 2 3 4;1\r\n", "Windows line end"),
    "words": ("the cat;0 0;0 1;1\n", "token_ids holds 'the'"),
    "Latin-1": (b"2 5 3 6 \xe9;0 0 0 1 1;0 1 2 3 4;1\n", "not UTF-8"),
    "a NUL byte": (b"2 5 3 6 \0;0 0 0 1 1;0 1 2 3 4;1\n", "token_ids holds"),
}


def special(name, type, **fields):
    info = tarfile.TarInfo(name)
    info.type = type
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def replace_member(archive_path, name, member):
    """The archive again, with this member in the place of a plain file."""
    with tarfile.open(archive_path) as archive:
        kept = [(info, archive.extractfile(info).read()) for info in archive if info.name != name]
    with tarfile.open(archive_path, "w") as archive:
        for info, content in kept:
            archive.addfile(info, io.BytesIO(content))
        archive.addfile(member)


def bad_images(place):
    """(folder, what to read, pattern) for each bad image in a folder, and for some of them in an archive."""
    contents = {name: (content, reason) for name, (content, reason) in REFUSED.items()}
    contents |= {"zero bytes": (b"", "empty"), "missing": (None, "No such file"), "FIFO": ("fifo", "not a regular file")}
    for number, (name, (content, reason)) in enumerate(contents.items()):
        bad = number % IMAGES  # in the shares of both ranks
        folder = copy_images(place, name)
        path = folder / "train" / f"{bad}.jpg"
        path.unlink()
        if content == "fifo":
            os.mkfifo(path)
        elif content is not None:
            path.write_bytes(content)
        told = rf"train\.txt, line {bad + 1}: train/{bad}\.jpg: .*{reason}.* \(Worker [01] met it\.\)$"
        yield "images", folder, f"^DataError: {folder}/{told}"
        if isinstance(content, bytes):
            archive = pack(folder)
            yield "images", archive, f"^DataError: {archive}: {told}"


def bad_members(place):
    for kind, fields in {
        tarfile.SYMTYPE: {"linkname": "/etc/passwd"},
        tarfile.LNKTYPE: {"linkname": "train/0.jpg"},
        tarfile.CHRTYPE: {"devmajor": 1, "devminor": 5},
        tarfile.FIFOTYPE: {},
        tarfile.DIRTYPE: {},
    }.items():
        folder = copy_images(place, f"member {kind.decode()}")
        archive = pack(folder)
        replace_member(archive, "train/5.jpg", special("train/5.jpg", kind, **fields))
        yield "images", archive, rf"^DataError: {archive}: train\.txt, line 6: train/5\.jpg: .*only plain files"


def bad_archives(place):
    archive = pack(copy_images(place, "a good archive"))
    whole = archive.read_bytes()
    huge = bytearray(whole)
    huge[124:136] = b"77777777777\0"  # the size of the first member
    huge[148:156] = b"%06o\0 " % (sum(huge[:148]) + 8 * 32 + sum(huge[156:512]))
    damaged = bytearray(whole)
    damaged[whole.index(b"train/3.jpg") + 150] ^= 0xFF
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "zero bytes": b"",
        "gzip": gzip.compress(whole),
        "no archive": b"GET / HTTP/1.1\r\n" * 100,
        "a size beyond the file": bytes(huge),
        "a damaged header": bytes(damaged),
    }.items():
        path = archive.with_name(f"{name}.tar")
        path.write_bytes(content)
        yield "images", path, rf"^DataError: {path}"


def bad_lists(place):
    for name, (content, reason) in LISTS.items():
        folder = copy_images(place, f"list {name}")
        (folder / "train.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        yield "images", folder, rf"^DataError: {folder}/train\.txt.*{reason}"
    folder = copy_images(place, "no list")
    (folder / "train.txt").unlink()
    yield "images", folder, rf"^DataError: {folder} has no train\.txt"
    folder = copy_images(place, "a list that is a FIFO")
    (folder / "train.txt").unlink()
    os.mkfifo(folder / "train.txt")
    yield "images", folder, rf"^DataError: {folder}/train\.txt: not a regular file"


def bad_lines(place):
    write_digital(place / "good lines" / "data", 20)
    for name, (content, reason) in LINES.items():
        folder = Path(shutil.copytree(place / "good lines", place / f"lines {name}")) / "data"
        with open(folder / "part-0", "ab") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        yield "lines", folder, rf"^DataError: {folder}/part-0, line 21: .*{reason}"
    folder = Path(shutil.copytree(place / "good lines", place / "lines cut gzip")) / "data"
    (folder / "part-1.gz").write_bytes(gzip.compress((folder / "part-0").read_bytes())[:-20])
    yield "lines", folder, rf"^DataError: {folder}/part-1\.gz, line \d+: the gzip data is damaged"
    folder = Path(shutil.copytree(place / "good lines", place / "lines empty")) / "data"
    (folder / "part-1").touch()
    yield "lines", folder, rf"^DataError: {folder}/part-1, line 1: the file is empty"
    folder = Path(shutil.copytree(place / "good lines", place / "lines list")) / "data"
    (folder / "train.txt").write_text("part-0\n../vocab.txt\n")
    yield "lines", folder, rf"^DataError: {folder}/train\.txt, line 2: .*leads out of the folder"
    folder = Path(shutil.copytree(place / "good lines", place / "lines order mark")) / "data"
    (folder / "part-0").write_bytes(b"\xef\xbb\xbf" + (folder / "part-0").read_bytes())
    yield "lines", folder, rf"^DataError: {folder}/part-0, line 1: .*byte order mark"


def bad_prose(place):
    for name, content, reason in (
        ("Latin-1", b"A line.\nCaf\xe9.\n", "line 2: byte 0xe9 is not UTF-8"),
        ("NUL", b"A line.\n\0\n", "line 2: a NUL byte"),
    ):
        folder = write_prose(place / f"prose {name}", 3)
        (folder / "bad.txt").write_bytes(content)
        yield "prose", folder, rf"^DataError: {folder}/bad\.txt, {reason}"
    folder = write_prose(place / "prose link", 3)
    (folder / "bad.txt").symlink_to("/etc/passwd")
    yield "prose", folder, rf"^DataError: {folder}/bad\.txt: a link that leads out"
    folder = write_prose(place / "prose FIFO", 3)
    os.mkfifo(folder / "bad.txt")
    yield "prose", folder, rf"^DataError: {folder}/bad\.txt: not a regular file"
    (place / "prose empty").mkdir()
    yield "prose", place / "prose empty", rf"^DataError: {place}/prose empty: no text files"


def copy_images(place, name):
    """A good data set in a folder of its own, made of links to the same files: what is bad in it is a file of its own."""
    folder = place / name / "data"
    shutil.copytree(place / "good" / "data", folder, copy_function=os.link)
    (folder / "train.txt").unlink()
    (folder / "train.txt").write_text((place / "good" / "data" / "train.txt").read_text())
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    write_images(place / "good" / "data", IMAGES)
    makers = (bad_images, bad_members, bad_archives, bad_lists, bad_lines, bad_prose)
    return place, [case for maker in makers for case in maker(place)]


def snapshot(place):
    """Every file, folder and link below, with its size and the time it was changed."""
    return {str(path): (entry := path.lstat()).st_size + entry.st_mtime_ns for path in place.rglob("*")}


def make_loader(kind, place, cache, workers):
    if kind == "images":
        return X.applications.Resnet20(num_classes=10).get_train_dataloader(place, 2, workers=workers)
    model = X.applications.Bert_base(**TINY_BERT)
    vocabulary = Path(place).parent / "vocab.txt" if kind == "lines" else None
    return model.load_digital_dataset_from_file(place, vocabulary, 32, 2, workers=workers, cache_dir=cache)


def train(kind, place, cache, workers):
    loader = make_loader(kind, place, cache, workers)
    width = 3 * 32 * 32 if kind == "images" else 1
    model = torch.nn.Linear(width, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for batch in loader:
        x = batch[0].flatten(1) if kind == "images" else batch["input_ids"][:, :1].float()
        optimizer.minimize(model(x).mean())


def train_on_all(rank, folder, size, cases, workers):
    """What each case ends with, and after how many seconds. Each has a process group of its own, closed by who fails."""
    import torch.distributed as dist

    world.close_world()
    ends = []
    for number, (kind, place, _) in enumerate(cases):
        dist.init_process_group("gloo", init_method=f"file://{folder}/case.{workers}.{number}", rank=rank, world_size=size)
        fleet.init()
        began = time.monotonic()
        end = raised(partial(train, kind, place, f"{folder}/cache", workers))
        ends.append((end, time.monotonic() - began))
        world.close_world()
    return ends


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.campaign), 2])
def test_each_bad_input_is_the_same_data_error_on_both_ranks_with_file_and_line(corpus, tmp_path, workers):
    place, cases = corpus
    before = snapshot(place)
    cases = [(kind, str(path), pattern) for kind, path, pattern in cases]
    ranks = run_job(train_on_all, 2, tmp_path, str(tmp_path), 2, cases, workers)
    wrong = []
    for (_, _, pattern), *ends in zip(cases, *ranks, strict=True):
        told = {message for message, _ in ends}
        if len(told) != 1 or not re.search(pattern, str(ends[0][0])) or max(seconds for _, seconds in ends) > SECONDS:
            wrong.append((pattern, ends))
    assert wrong == []
    assert {message[-17:] for message, _ in ranks[0]} >= {"(Worker 0 met it.)"[-17:], "(Worker 1 met it.)"[-17:]}
    assert snapshot(place) == before
    assert len(cases) > 70


TRAIN = """
import sys, time, torch
import fleetx as X
from fleetx import fleet
fleet.init()
loader = X.applications.Resnet20(num_classes=10).get_train_dataloader(sys.argv[1] if sys.argv[1:] else "data", 2, workers=2)
model = torch.nn.Linear(3 * 32 * 32, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
for epoch in range(10000):
    for images, labels in loader:
        optimizer.minimize(model(images.flatten(1)).mean())
    open(f"epoch.{fleet.worker_index()}", "a").close()
"""


@pytest.fixture(scope="module")
def start():
    with launchers() as started:
        yield started.start


@pytest.mark.parametrize("worker,bad", [(0, 2), pytest.param(1, 4, marks=pytest.mark.campaign)])
def test_under_fleetrun_a_bad_image_ends_both_workers_with_its_sentence_and_leaves_no_process(start, tmp_path, worker, bad):
    write_images(tmp_path / "data", IMAGES)
    (tmp_path / "data" / "train" / f"{bad}.jpg").write_bytes(b"")
    run = start(tmp_path, TRAIN, "--nproc_per_node", "2")
    assert run.wait() == 1
    sentence = f"data/train.txt, line {bad + 1}: train/{bad}.jpg: the file is empty (0 bytes). (Worker {worker} met it.)"
    assert sentence in run.told + run.console
    wait_until(lambda: not run.left_behind(), limit_seconds=5)


def test_ctrl_c_while_workers_read_is_exit_code_130_without_tracebacks_or_orphans(start, tmp_path):
    write_images(tmp_path / "data", IMAGES)
    run = start(tmp_path, TRAIN, "--nproc_per_node", "2")
    wait_until(lambda: all((tmp_path / f"epoch.{rank}").exists() for rank in (0, 1)))
    run.send(signal.SIGINT)
    assert run.wait() == 130
    wait_until(lambda: not run.left_behind(), limit_seconds=5)
    assert (run.log(0) + run.log(1) + run.told).count("Traceback") <= 2, run.log(0) + run.log(1)


def test_a_reading_process_that_is_killed_ends_the_job_in_words(start, tmp_path):
    write_images(tmp_path / "data", IMAGES)
    run = start(tmp_path, TRAIN, "--nproc_per_node", "2")
    wait_until(lambda: all((tmp_path / f"epoch.{rank}").exists() for rank in (0, 1)))
    os.kill(reading_process(run), signal.SIGKILL)
    assert run.wait() == 1
    assert re.search("was ended by SIGKILL|DataLoader worker .* is killed by signal: Killed", run.told + run.console)
    wait_until(lambda: not run.left_behind(), limit_seconds=5)


def reading_process(run):
    """A process whose parent's parent is not the launcher's own: a worker of a rank's loader."""
    import psutil

    ranks = {pid for pid in run.left_behind() if psutil.Process(pid).ppid() == run.pid}
    return next(pid for pid in run.left_behind() if psutil.Process(pid).ppid() in ranks)

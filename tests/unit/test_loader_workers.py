"""Reading processes of a loader: what they leave open, what happens when one is killed, and copies and forks of their owner."""

from __future__ import annotations

import copy
import gc
import multiprocessing.connection
import os
import resource
import signal
import threading

import psutil
import pytest
import torch

import fleetx as X
from fleetx.data import workers
from fleetx.data.loader import Loader
from fleetx.dist import world
from fleetx.errors import DataError
from tests.helpers.data_ranks import run_job, write_images
from tests.helpers.harness import raised

IMAGES = 48


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    write_images(place / "data", IMAGES)
    return place


@pytest.fixture
def loader(images, alone):
    return make(images / "data")


def make(place, workers=2, batch_size=2, **options) -> Loader:
    return X.applications.Resnet20(num_classes=10).get_train_dataloader(place, batch_size, workers=workers, **options)


def sums(loader):
    return [images.sum().item() for images, _ in loader]


def children():
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def begun_and_killed(loader):
    """A pass whose workers are killed after the first batch."""
    others = children()  # of the tests' own, which serve many of them
    batches = iter(loader)
    next(batches)
    for child in children():
        if child not in others:
            child.kill()
    return batches


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def quiet_children():
    """torch raises from a signal handler when a worker dies, wherever the process happens to be: between two lines of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", True)
        before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        yield
        signal.signal(signal.SIGCHLD, before)


def test_labels_that_the_loop_keeps_do_not_keep_their_images_nor_a_file(loader):
    next(iter(loader))
    before = open_files()
    kept = [labels for _, labels in loader]
    assert len(kept) == 24 and open_files() < before + 12
    assert all(labels.untyped_storage().nbytes() == labels.nbytes == 16 for labels in kept)


def test_a_worker_that_is_killed_is_told_in_words_and_the_next_pass_has_new_ones(loader, quiet_children, images):
    batches = begun_and_killed(loader)
    with pytest.raises(DataError, match=r"^a process that reads this loader's data was ended by SIGKILL\. .*workers=0"):
        list(batches)
    assert sums(loader) == sums(make(images / "data", workers=0))


def test_a_second_death_told_by_torch_while_the_first_is_looked_into_changes_nothing(loader, quiet_children, monkeypatch):
    interrupted = []

    def interrupting(sentinels, timeout):
        if not interrupted:
            interrupted.append(True)
            raise RuntimeError("DataLoader worker (pid 8876) is killed by signal: Killed.")
        return multiprocessing.connection.wait(sentinels, timeout)

    monkeypatch.setattr(workers, "wait", interrupting)
    batches = begun_and_killed(loader)
    with pytest.raises(DataError, match=r"was ended by SIGKILL\."):
        list(batches)
    assert interrupted


def test_an_error_that_is_no_death_of_a_worker_stays_what_it_is(loader, monkeypatch):
    monkeypatch.setattr(loader.source, "finish", lambda batch: [][1])
    with pytest.raises(IndexError):
        list(loader)

    def broken(batch):
        raise RuntimeError("of the user's own")

    monkeypatch.setattr(loader.source, "finish", broken)
    with pytest.raises(RuntimeError, match="of the user's own"):
        list(loader)


def read_without_room(rank, place):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of shared memory too
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        return raised(lambda: sums(make(place)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_without_shared_memory_the_error_says_what_to_do(images, tmp_path):
    (told,) = run_job(read_without_room, 1, tmp_path, str(images / "data"))
    assert told.startswith("DataError: no shared memory for a batch of 6.14 KiB (")
    assert "--shm-size" in told and "workers=0" in told


def read_in_a_fork(rank, place):
    loader = make(place)
    whole = sums(loader)
    loader.sampler.set_epoch(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if sums(loader) == whole else 1)
    status = os.waitpid(child, 0)[1]
    return [status, sums(loader) == whole]


def test_a_forked_child_reads_with_workers_of_its_own_and_leaves_the_parents_alone(images, tmp_path):
    assert run_job(read_in_a_fork, 1, tmp_path, str(images / "data")) == [[0, True]]


def test_a_copy_reads_the_same_with_workers_of_its_own_also_after_the_original_is_gone(images, alone):
    loader = make(images / "images.tar")
    whole = sums(loader)
    twin = copy.deepcopy(loader)
    twin.sampler.set_epoch(0)
    del loader
    gc.collect()
    unrelated = os.open("/dev/zero", os.O_RDONLY)  # most likely under the number of the closed archive
    try:
        assert sums(twin) == whole
    finally:
        os.close(unrelated)


def test_a_loader_that_is_let_go_in_mid_pass_takes_its_workers_along(images, alone):
    before = len(children())
    loader = make(images / "data")
    batches = iter(loader)
    next(batches)
    assert len(children()) == before + 2
    del batches, loader
    gc.collect()
    assert len(children()) == before


def test_many_passes_broken_off_or_not_leave_nothing_open_and_start_no_more_processes(loader):
    sums(loader)
    files, processes = open_files(), len(children())
    for turn in range(12):
        for number, _ in enumerate(loader):
            if turn % 3 and number == turn:
                break
    assert open_files() <= files + 4  # what is on its way
    assert len(children()) == processes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_workers_survive_garbage_that_holds_batches_of_another_loader(images, monkeypatch):
    monkeypatch.setenv("FLEETX_DEVICE", "cuda")
    world.close_world()
    first, second = make(images / "data"), make(images / "data")
    gc.collect()
    gc.disable()
    try:
        for batch in first:
            cycle = [batch]
            cycle.append(cycle)
        del batch, cycle
        read = second.source.batch
        monkeypatch.setattr(second.source, "batch", lambda *key: (gc.collect(), read(*key))[1])
        assert len(sums(second)) == 24
    finally:
        gc.enable()
        world.close_world()


def test_a_thread_and_two_loaders_at_once_read_the_same_as_one(loader, images):
    whole, read = sums(make(images / "data", workers=0)), []
    thread = threading.Thread(target=lambda: read.extend(sums(loader)))
    thread.start()
    thread.join()
    other = make(images / "data", workers=1)
    assert read == whole
    loader.sampler.set_epoch(0)
    pairs = list(zip(loader, other, strict=True))
    assert [first[0].sum().item() for first, _ in pairs] == [second[0].sum().item() for _, second in pairs] == whole

"""The loader in a job: shares, a resume on another number of ranks, and one rank's bad file on all of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fleetx import fleet
from fleetx.data.loader import Loader
from fleetx.errors import DataError
from tests.helpers.harness import raised, run_ranks


class Rows:
    """Sample i is four times the number i; `bad` samples cannot be read."""

    reads_files, plans_batches = True, False

    def __init__(self, length, bad=()):
        self.length, self.bad = length, set(bad)

    def __len__(self):
        return self.length

    def batch(self, epoch, indices):
        for index in indices:
            if int(index) in self.bad:
                raise DataError(f"train.txt, line {index + 1}: a.jpg is empty.")
        return torch.from_numpy(np.repeat(indices[:, None], 4, axis=1)), []

    def finish(self, batch):
        return batch.float()


def read_and_save(rank, folder, batches):
    loader = Loader(Rows(48), 4, shuffle=True, workers=0)
    passes = iter(loader)
    read = [next(passes)[:, 0].tolist() for _ in range(batches)]
    fleet.save_checkpoint(folder, step=batches, loader=loader)
    return read


def load_and_read(rank, folder):
    loader = Loader(Rows(48), 4, shuffle=True, workers=0)
    fleet.load_checkpoint(folder, new_world_size=True, loader=loader)
    return [batch[:, 0].tolist() for batch in loader]


def in_order(ranks):
    """Rank r holds every N-th sample of each global batch."""
    return [sample for step in zip(*ranks, strict=True) for row in zip(*step, strict=True) for sample in row]


def test_a_checkpoint_with_the_loader_in_it_goes_on_with_the_same_samples_on_other_ranks(tmp_path):
    before = run_ranks(read_and_save, 2, str(tmp_path), 3)
    whole = in_order(run_ranks(read_and_save, 1, str(tmp_path / "other"), 12))
    for size in (1, 3):
        after = run_ranks(load_and_read, size, str(tmp_path))
        assert in_order(before) + in_order(after) == whole


def train_on(rank, bad):
    loader = Loader(Rows(24, bad=bad), 4, shuffle=True, workers=0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    done = []

    def loop():
        for batch in loader:
            optimizer.minimize(model(batch).mean())
            done.append(1)

    return raised(loop), len(done)


def test_a_file_that_one_worker_cannot_read_is_the_same_error_on_all_of_them():
    errors = run_ranks(train_on, 3, [17])
    told = {message for message, _ in errors}
    assert len(told) == 1
    (message,) = told
    assert message.startswith("DataError: train.txt, line 18: a.jpg is empty. (Worker ")


def only_read(rank, bad, batch_size):
    loader = Loader(Rows(24, bad=bad), batch_size, shuffle=False, workers=0)
    fleet.barrier_worker()  # trouble from before a loader was made is none of its own

    def late():
        if rank == 0:
            fleet.barrier_worker()  # reads after worker 1 has met the file
        return list(loader)

    try:
        return raised(late)
    finally:
        if rank == 1:
            fleet.barrier_worker()


def test_a_worker_that_only_reads_is_told_at_its_next_batch():
    first, second = run_ranks(only_read, 2, [1], 4)
    assert first == second == "DataError: train.txt, line 2: a.jpg is empty. (Worker 1 met it.)"


def read_after_trouble(rank, bad):
    first = raised(lambda: list(Loader(Rows(24, bad=bad), 4, shuffle=False, workers=0)))
    fleet.barrier_worker()
    return first, len(list(Loader(Rows(24), 4, shuffle=False, workers=0)))


def test_trouble_that_a_script_has_got_over_does_not_stop_its_next_loader():
    for error, batches in run_ranks(read_after_trouble, 2, [0, 1]):
        assert error.startswith("DataError: train.txt, line ")
        assert batches == 3


RANK_ZERO_KEEPS_THE_STORE = """
import torch
from fleetx import fleet
from fleetx.data.loader import Loader
from tests.ranks.test_loader_ranks import Rows

fleet.init()
model = torch.nn.Linear(4, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
for batch in Loader(Rows(24, bad=[{bad}]), 4, shuffle=False, train=True, workers=0):
    optimizer.minimize(model(batch).mean())
"""


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_the_word_is_heard_also_where_the_failing_worker_keeps_the_store(failing):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = RANK_ZERO_KEEPS_THE_STORE.format(bad=8 + failing)
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=60)[1].strip().splitlines()[-1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    told = f"fleetx.errors.DataError: train.txt, line {9 + failing}: a.jpg is empty. (Worker {failing} met it.)"
    assert all(end.endswith(told) for end in ends) and all(rank.returncode == 1 for rank in ranks), ends

"""A checkpoint in the middle of an epoch, and the run that goes on from it on other ranks with other workers: the same samples.

What is compared are hashes of every sample's bytes (pixels after augmentation; tokens, masks and pairs), in the order of the
global batch, which is the order of the epoch: rank r of N holds rows r, r + N, ... of it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import fleetx as X
from fleetx import fleet
from tests.helpers.data_ranks import (
    TINY_BERT,
    image_hashes,
    left_behind,
    run_job,
    start_job,
    text_hashes,
    write_digital,
    write_images,
    write_prose,
)
from tests.helpers.launchers import wait_until

KINDS = ("folder", "tar", "lines", "raw", "tokens", "raw tokens", "whole tail")
WORKERS = (0, 1, 3)
IMAGES, LINES, EPOCHS = 50, 50, 3
STOPS = ((0, 3), (0, None), (1, 2))
"""Epoch, and after how many of its batches the run is saved: None is after its last."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    write_images(place / "images", IMAGES)
    write_digital(place / "lines", LINES)
    write_prose(place / "prose", 12)
    return place


def make_loader(kind, data, workers):
    """A batch is 4 samples, or 64 tokens."""
    data = Path(data)
    if kind in ("folder", "tar", "whole tail"):
        model = X.applications.Resnet20(num_classes=10)
        tail = {"drop_last": False} if kind == "whole tail" else {}
        place = data / ("images.tar" if kind == "tar" else "images")
        return model.get_train_dataloader(place, 4, workers=workers, seed=5, **tail), image_hashes
    model = X.applications.Bert_base(**TINY_BERT)
    place = data / ("prose" if kind.startswith("raw") else "lines")
    options = {"cache_dir": data / "cache", "workers": workers, "seed": 5}
    vocabulary = None if kind.startswith("raw") else data / "vocab.txt"
    if not kind.endswith("tokens"):
        return model.load_digital_dataset_from_file(place, vocabulary, 32, 4, **options), text_hashes
    loader = model.load_digital_dataset_from_file(place, vocabulary, 32, 64, in_tokens=True, **options)
    return loader, lambda batch: ["+".join(text_hashes(batch))]


def run_whole(rank, data, folder, workers, kinds):
    """Three epochs without a break, saved on the way; the hashes of each epoch."""
    read = {}
    for kind in kinds:
        loader, hashes = make_loader(kind, data, workers)
        read[kind] = []
        for epoch in range(EPOCHS):
            found = []
            for number, batch in enumerate(loader, start=1):
                found.append(hashes(batch))
                for stop, after in STOPS:
                    if epoch == stop and number == (len(loader) if after is None else after):
                        fleet.save_checkpoint(f"{folder}/{kind}/{stop}.{after}", step=number, loader=loader)
            read[kind].append(found)
    return read


def cases(size):
    """Kind, stop and number of workers: each kind meets each stop and each number once; other ones together for each size."""
    for number, kind in enumerate(KINDS):
        for turn, (stop, after) in enumerate(STOPS):
            yield kind, stop, after, WORKERS[(number + turn + size) % len(WORKERS)]


def run_rest(rank, data, folder, size):
    """From every checkpoint on: the rest of its epoch and the epochs after it."""
    read = []
    for kind, stop, after, workers in cases(size):
        loader, hashes = make_loader(kind, data, workers)
        fleet.load_checkpoint(f"{folder}/{kind}/{stop}.{after}", new_world_size=True, loader=loader)
        epochs = range(loader.sampler.epoch, EPOCHS)
        read.append([[hashes(batch) for batch in loader] for _ in epochs])
    return read


def in_order(ranks):
    """The samples of one epoch from the batches of each rank."""
    return [sample for step in zip(*ranks, strict=True) for row in zip(*step, strict=True) for sample in row]


def epochs_of(ranks):
    return [in_order(epoch) for epoch in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Two ranks with two workers each, and one rank without any, which agree."""
    folder = tmp_path_factory.mktemp("checkpoints")
    two = run_job(run_whole, 2, folder / "two", str(data), str(folder), 2, KINDS)
    one = run_job(run_whole, 1, folder / "one", str(data), str(folder / "of one"), 0, KINDS)
    return folder, {kind: [epochs_of([rank[kind] for rank in ranks]) for ranks in (two, one)] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_workers_read_what_one_rank_without_reads(uninterrupted, kind):
    two, one = uninterrupted[1][kind]
    assert len(two) == len(one) == EPOCHS
    for of_two, of_one in zip(two, one, strict=True):
        common = min(len(of_two), len(of_one), 48)
        assert of_two[:common] == of_one[:common] and len(set(of_two[:common])) == common >= 6
    again = len(set(two[0]) & set(two[1]))  # another epoch, other crops and masks; in a short line the same one may be chosen
    assert again < len(two[0]) / 2


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.campaign)])
def test_the_rest_of_an_epoch_is_the_same_on_other_ranks_with_other_workers(uninterrupted, data, size):
    folder, whole = uninterrupted
    ranks = run_job(run_rest, size, folder / f"rest{size}", str(data), str(folder), size)
    for number, case in enumerate(cases(size)):
        kind, stop, after, _ = case
        rest = epochs_of([rank[number] for rank in ranks])
        batch = 1 if kind.endswith("tokens") else 4
        first = stop if after is not None else stop + 1
        expected = whole[kind][1][first:]
        if after is not None:
            expected[0] = expected[0][after * batch * 2 :]
        assert len(rest) == EPOCHS - first, case
        check_epochs(case, rest, expected, size=size, batch=batch)
        if case[:3] == ("folder", 0, 3):  # by hand: 24 of 50 images are read; of 26, one rank makes 6 batches of 4, three 2 each
            assert [len(epoch) for epoch in rest] == [24, 48, 48]


def check_epochs(case, rest, expected, *, size, batch):
    """Equal as far as both go; what only one of them has is less than a global batch, or the padding of the last row."""
    for got, wanted in zip(rest, expected, strict=True):
        common = min(len(got), len(wanted))
        assert common > 0 and got[:common] == wanted[:common], case
        assert abs(len(got) - len(wanted)) < size * batch, case


def train_and_save(rank, data, folder):
    """Saved after each step; at the sixth all wait for one to be killed."""
    loader, hashes = make_loader("folder", data, 2)
    model = torch.nn.Linear(3 * 32 * 32, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for number, (images, labels) in enumerate(loader, start=1):
        optimizer.minimize(model(images.flatten(1)).mean())
        with open(f"{folder}/read.{rank}", "a") as file:
            print(*hashes((images, labels)), file=file)
        if number == 5:
            Path(folder, f"waits.{rank}").touch()
            signal.pause()
        fleet.save_checkpoint(f"{folder}/checkpoints", step=number, model=model, optimizer=optimizer, loader=loader)


def train_on(rank, data, folder):
    loader, hashes = make_loader("folder", data, 1)
    model = torch.nn.Linear(3 * 32 * 32, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    found = fleet.load_checkpoint(f"{folder}/checkpoints", new_world_size=True, model=model, optimizer=optimizer, loader=loader)
    return found.step, [hashes(batch) for batch in loader]


def test_after_a_sigkill_in_mid_epoch_a_resumed_run_reads_on_after_the_last_checkpoint(uninterrupted, data, tmp_path):
    killed = start_job(train_and_save, 2, tmp_path / "killed", str(data), str(tmp_path))
    wait_until(lambda: all((tmp_path / f"waits.{rank}").exists() for rank in (0, 1)))
    assert len(left_behind(killed)) == 2 * 3
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    for process in killed:
        process.join()
    wait_until(lambda: not left_behind(killed), limit_seconds=15)  # the loaders' workers end as well
    whole = uninterrupted[1]["folder"][0][0]
    before = [[line.split() for line in (tmp_path / f"read.{rank}").read_text().splitlines()] for rank in (0, 1)]
    assert in_order(before) == whole[: 5 * 8]
    for size in (1, 3):
        ranks = run_job(train_on, size, tmp_path / f"after{size}", str(data), str(tmp_path))
        assert {step for step, _ in ranks} == {4}
        rest = in_order([read for _, read in ranks])
        assert rest == whole[4 * 8 :][: len(rest)] and len(rest) == {1: 16, 3: 12}[size]


def test_every_sample_of_an_epoch_comes_once(uninterrupted):
    for kind in KINDS:
        of_one = uninterrupted[1][kind][1]
        for epoch in of_one:
            assert len(set(epoch)) == len(epoch), kind

"""Batches of listed images: the same bits from every reader, and every bad file named with its line."""

import multiprocessing
import os
import re
import tarfile
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from fleetx.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from fleetx.data.images.from_paths import image_folder_source, image_list_source
from fleetx.data.loader import Loader
from fleetx.data.sampler import FleetSampler
from fleetx.errors import ConfigError, DataError, FleetWarning
from tests.helpers.bad_images import REFUSED, encoded, photo

COUNT = 12


def write_set(folder, *, size=(40, 30), count=COUNT, split="train"):
    """Images 0.jpg, 1.png, 2.jpg ... with labels 0, 1, 2 ..., each of one shade more."""
    (folder / split).mkdir(parents=True)
    lines = []
    for i in range(count):
        name, format = (f"{split}/{i}.jpg", "JPEG") if i % 2 == 0 else (f"{split}/{i}.png", "PNG")
        image = photo(*size).point(lambda value, i=i: value // 2 + i)
        (folder / name).write_bytes(encoded(image, format))
        lines.append(f"{name} {i}\n")
    (folder / f"{split}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of 40 x 30, and of 32 x 32."""
    top = tmp_path_factory.mktemp("sets")
    write_set(top / "photos")
    write_set(top / "small", size=(32, 32))
    write_set(top / "photos", split="test")
    return top


def images(source, epoch=0, indices=range(COUNT)):
    (pixels, labels), complaints = source.batch(epoch, np.array(indices))
    return pixels, labels, complaints


def sources(folder, **options):
    """One that makes random boxes of 64 x 64, one that shifts 32 x 32."""
    yield image_folder_source(folder / "photos", "train", image_size=64, **options)
    yield image_folder_source(folder / "small", "train", image_size=32, **options)


def test_a_batch_is_bytes_in_channels_last_order_with_labels(folder):
    for source in sources(folder):
        pixels, labels, complaints = images(source)
        assert pixels.dtype == torch.uint8 and pixels.shape == (COUNT, 3, source.image_size, source.image_size)
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == list(range(COUNT)) and labels.dtype == torch.int64 and complaints == []


def test_an_image_depends_on_seed_epoch_and_number_and_on_nothing_else(folder):
    for source in sources(folder, seed=5):
        together, _, _ = images(source, epoch=3)
        for indices in ([7], [11, 7, 0], list(range(COUNT))[::-1], [7, 7]):
            pixels, labels, _ = images(source, epoch=3, indices=indices)
            assert labels.tolist() == indices
            torch.testing.assert_close(pixels, together[indices], rtol=0, atol=0)
        other_epoch, _, _ = images(source, epoch=4)
        assert not torch.equal(together, other_epoch)
    for one, other in zip(sources(folder, seed=5), sources(folder, seed=6), strict=True):
        assert not torch.equal(images(one)[0], images(other)[0])


def _in_another_process(path, queue):
    source = image_folder_source(path, "train", image_size=32, seed=5)
    queue.put(images(source)[0].numpy().tobytes())


def test_another_process_reads_the_same_bits(folder):
    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=_in_another_process, args=(folder / "small", queue))
    process.start()
    theirs = queue.get(timeout=60)
    process.join()
    source = image_folder_source(folder / "small", "train", image_size=32, seed=5)
    assert theirs == images(source)[0].numpy().tobytes()


@pytest.mark.parametrize("top", ["", "photos"])
def test_an_archive_gives_the_same_bits_as_the_folder(folder, tmp_path, top):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(folder / "photos", arcname=top or ".")
    ours = image_folder_source(tmp_path / "x.tar", "train", image_size=64)
    theirs = image_folder_source(folder / "photos", "train", image_size=64)
    torch.testing.assert_close(images(ours)[0], images(theirs)[0], rtol=0, atol=0)
    if not top:
        listed = image_list_source(folder / "photos" / "train.txt", tmp_path / "x.tar", train=True, image_size=64)
        torch.testing.assert_close(images(listed)[0], images(theirs)[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_loader_gives_the_same_bits_with_and_without_workers(folder, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(folder / "small", arcname=".")

    def epochs(place, workers):
        source = image_folder_source(place, "train", image_size=32, channels_last=workers > 0)
        sampler = FleetSampler(len(source), rank=0, size=1)
        loader = Loader(source, 5, shuffle=True, sampler=sampler, device=torch.device("cpu"), workers=workers, drop_last=False)
        return [batch for _ in range(2) for batch in loader]

    alone = epochs(folder / "small", 0)
    assert [len(labels) for _, labels in alone] == [5, 5, 2] * 2
    for place in (folder / "small", tmp_path / "x.tar"):
        for (ours, our_labels), (theirs, their_labels) in zip(epochs(place, 2), alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            torch.testing.assert_close(our_labels, their_labels, rtol=0, atol=0)


def test_flips_happen_to_half_of_the_images_and_can_be_switched_off(folder):
    plain = image_folder_source(folder / "small", "train", image_size=32, flip=False)
    mirrored = image_folder_source(folder / "small", "train", image_size=32)
    evaluated, _, _ = images(image_folder_source(folder / "small", "train", train=False, image_size=32))
    flips = 0
    for epoch in range(20):
        a, b = images(plain, epoch)[0], images(mirrored, epoch)[0]
        same = [torch.equal(x, y) for x, y in zip(a, b, strict=True)]
        flips += COUNT - sum(same)
    assert 80 < flips < 160  # of 240
    assert torch.equal(evaluated[0], torch.from_numpy(np.array(Image.open(folder / "small/train/0.jpg"))).permute(2, 0, 1))


def test_evaluation_is_the_same_in_every_epoch_and_for_every_seed(folder):
    one = image_folder_source(folder / "photos", "test", image_size=64, seed=1)
    other = image_folder_source(folder / "photos", "val", image_size=64, seed=2)
    assert not one.train and not other.train
    torch.testing.assert_close(images(one, epoch=0)[0], images(other, epoch=9)[0], rtol=0, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_finish_normalises_in_float32_in_the_layout_asked_for(folder, channels_last):
    source = image_folder_source(folder / "photos", "train", image_size=64, channels_last=channels_last)
    pixels, labels, _ = images(source)
    floats, same_labels = source.finish((pixels, labels))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    # Numbers up to 3 in float32, two roundings: a few units of 2**-22.
    torch.testing.assert_close(floats.double(), (pixels.double() / 255 - mean) / std, rtol=0, atol=2e-6)
    assert floats.dtype == torch.float32 and same_labels is labels
    assert floats.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


BAD = REFUSED | {
    "zero bytes": (b"", "the file is empty"),
    "missing": (None, "No such file"),
    "a FIFO": ("fifo", "not a regular file"),
    "a folder": ("folder", "not a regular file"),
}


def spoil(path, content):
    path.unlink()
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)


def contents(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("content,reason", BAD.values(), ids=BAD)
def test_a_bad_image_is_named_with_file_line_and_reason_and_can_be_skipped(tmp_path, content, reason):
    write_set(tmp_path, count=4)
    spoil(tmp_path / "train" / "2.jpg", content)
    before = contents(tmp_path)
    expected = f"^{tmp_path}/train.txt, line 3: train/2.jpg: .*{reason}"
    strict = image_folder_source(tmp_path, "train", image_size=64)
    with pytest.raises(DataError, match=expected):
        strict.batch(0, np.array([1, 2]))
    patient = image_folder_source(tmp_path, "train", image_size=64, on_bad_sample="skip")
    pixels, labels, complaints = images(patient, indices=[1, 2, 0])
    assert len(complaints) == 1 and re.match(expected, complaints[0])
    assert labels.tolist() == [1, 3, 0]
    torch.testing.assert_close(pixels, images(strict, indices=[1, 3, 0])[0], rtol=0, atol=0)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content,reason", BAD.values(), ids=BAD)
def test_a_bad_member_of_an_archive_is_named_too(tmp_path, content, reason):
    if content in ("fifo", "folder", None):
        reason = "has no such member" if content is None else "in the archive, and only plain files are read"
    write_set(tmp_path / "set", count=4)
    spoil(tmp_path / "set/train/2.jpg", content)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "set", arcname=".")
    source = image_folder_source(tmp_path / "x.tar", "train", image_size=64)
    with pytest.raises(DataError, match=f"^{tmp_path}/x.tar: train.txt, line 3: train/2.jpg: .*{reason}"):
        source.batch(0, np.array([2]))


def test_bad_samples_are_replaced_in_a_circle_and_each_is_reported_once(tmp_path):
    write_set(tmp_path, count=4)
    (tmp_path / "train/3.png").unlink()
    (tmp_path / "train/0.jpg").write_bytes(b"")
    source = image_folder_source(tmp_path, "train", image_size=64, on_bad_sample="skip")
    _, labels, complaints = images(source, indices=[3, 0, 2])
    assert labels.tolist() == [1, 1, 2]
    assert [complaint.split(": ")[0].rsplit(" ", 1)[1] for complaint in complaints] == ["4", "1"]


def test_when_nothing_can_be_read_skipping_ends_with_an_error(tmp_path):
    write_set(tmp_path, count=4)
    source = image_folder_source(tmp_path, "train", image_size=64, on_bad_sample="skip")
    for name in ("0.jpg", "1.png", "2.jpg", "3.png"):
        (tmp_path / "train" / name).write_bytes(b"x")
    with pytest.raises(
        DataError, match="train.txt, line 1: .* all images before it, from .*train.txt, line 2: train/1.png on, cannot"
    ):
        images(source, indices=[1])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_loader_counts_skipped_images_and_stops_at_the_share_allowed(tmp_path):
    write_set(tmp_path, count=10)
    (tmp_path / "train/2.jpg").write_bytes(b"")
    source = image_folder_source(tmp_path, "train", image_size=64, on_bad_sample="skip")

    def run(share, workers):
        sampler = FleetSampler(10, rank=0, size=1)
        loader = Loader(
            source, 5, shuffle=True, sampler=sampler, device=torch.device("cpu"), workers=workers, max_bad_share=share
        )
        return sorted(label for _, labels in loader for label in labels.tolist())

    for workers in (0, 1):
        with pytest.warns(FleetWarning, match="train.txt, line 3: train/2.jpg: the file is empty"):
            assert run(0.1, workers) == [0, 1, 3, 3, 4, 5, 6, 7, 8, 9]
        with pytest.raises(DataError, match="line 3: train/2.jpg: the file is empty"), warnings.catch_warnings():
            run(0.05, workers)


def test_lists_are_looked_for_by_their_split(folder, tmp_path):
    assert image_folder_source(folder / "photos", "val", image_size=32).entries.name.endswith("photos/test.txt")
    with pytest.raises(DataError, match="small has no val.txt nor test.txt: expected a list"):
        image_folder_source(folder / "small", "val")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(folder, arcname=".")
    with pytest.raises(DataError, match="several lists of that name: photos/train.txt, small/train.txt"):
        image_folder_source(tmp_path / "x.tar", "train")
    with tarfile.open(tmp_path / "y.tar", "w") as archive:
        archive.add(folder / "small", arcname=".")
    with pytest.raises(DataError, match="y.tar has no test.txt, at its top or in its top folder"):
        image_folder_source(tmp_path / "y.tar", "test")


def test_labels_beyond_the_models_classes_are_refused_before_training(folder):
    with pytest.raises(DataError, match="train.txt, line 12: the label must be an integer from 0 to 10, got '11'"):
        image_folder_source(folder / "small", "train", num_classes=11)


@pytest.mark.parametrize(
    "option,value",
    [
        ("image_size", 0),
        ("image_size", 32.0),
        ("image_size", True),
        ("train", 1),
        ("seed", -1),
        ("flip", None),
        ("mean", (0.5, 0.5)),
        ("mean", (0.5, float("nan"), 0.5)),
        ("std", (0.5, 0.0, 0.5)),
        ("on_bad_sample", "ignore"),
        ("channels_last", "yes"),
        ("max_pixels", 0),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(folder, option, value):
    with pytest.raises(ConfigError, match=f"{option} is .*; it must be "):
        image_folder_source(folder / "small", "train", **{option: value})


@pytest.mark.parametrize("path", [None, "", 7, b"bytes", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match="place must be a path"):
        image_folder_source(path, "train")
    with pytest.raises(ConfigError, match="split is 'all'; it must be one of"):
        image_folder_source("x", "all")

"""The images of bench/large_batch: an archive read safely, and augmentation against numpy."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from bench.lib import cifar10
from bench.lib.image_draws import DEVIATION, MEAN, crop_and_flip, cut_out, draw, micro_batch, mirrored, normalise
from fleetx.errors import DataError


def archive_of(folder, entries, lists):
    path = folder / "images.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for name, data in {**entries, **{name: text.encode() for name, text in lists.items()}}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("train/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def numbered(value):
    return np.full((32, 32, 3), value, np.uint8)


def test_an_archive_gives_its_images_in_the_order_of_the_lists_and_is_decoded_once(tmp_path):
    entries = {"train/a.png": png(numbered(1)), "train/b.png": png(numbered(2)), "test/c.png": png(numbered(3))}
    path = archive_of(tmp_path, entries, {"train.txt": "train/b.png 7\ntrain/a.png 0\n", "test.txt": "test/c.png 9\n"})
    for _ in range(2):
        splits = cifar10.load(path, tmp_path / "cache")
        assert splits["train"].images[:, 5, 5, 1].tolist() == [2, 1] and splits["train"].labels.tolist() == [7, 0]
        assert splits["test"].images[:, 0, 0, 0].tolist() == [3] and splits["test"].labels.tolist() == [9]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "train, message",
    [
        ("train/a.png 10\n", "train.txt, line 1: 'train/a.png 10'"),
        ("train/a.png 1\ntrain/a.png\n", "train.txt, line 2"),
        ("", "lists no image"),
        ("train/other.png 1\n", "train/other.png.*not in the archive"),
        ("train/link.png 1\n", "train/link.png.*not in the archive"),
    ],
)
def test_a_list_that_does_not_fit_its_archive_is_refused(tmp_path, train, message):
    path = archive_of(tmp_path, {"train/a.png": png(numbered(1))}, {"train.txt": train, "test.txt": "train/a.png 1\n"})
    with pytest.raises(DataError, match=message):
        cifar10.read_archive(path)


@pytest.mark.parametrize("data, message", [(b"no image", "decoded"), (png(numbered(0)[:16]), r"shape \(16, 32, 3\)")])
def test_a_member_that_is_no_image_of_32_pixels_is_refused_by_name(tmp_path, data, message):
    path = archive_of(tmp_path, {"train/a.png": data}, {"train.txt": "train/a.png 1\n", "test.txt": "train/a.png 1\n"})
    with pytest.raises(DataError, match=f"train/a.png.*{message}"):
        cifar10.read_archive(path)


def test_every_tenth_image_is_held_out():
    images = cifar10.Images(np.zeros((40, 32, 32, 3), np.uint8), np.arange(40, dtype=np.uint8))
    rest, held_out = cifar10.held_out(images)
    assert held_out.labels.tolist() == [0, 10, 20, 30] and len(rest) == 36 and 10 not in rest.labels


# Augmentation


def test_positions_are_reflected_without_repeating_the_border():
    assert mirrored(torch.arange(-2, 6), 4).tolist() == [2, 1, 0, 1, 2, 3, 2, 1]


def test_crops_and_flips_equal_those_of_an_image_padded_by_numpy():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    index, top, left, flip = (
        np.arange(60) % 5,
        random.integers(0, 9, 60),
        random.integers(0, 9, 60),
        random.integers(0, 2, 60) == 1,
    )
    top[:2], left[:2] = (0, 8), (8, 0)
    ours = crop_and_flip(torch.from_numpy(images), *(torch.from_numpy(part) for part in (index, top, left, flip)))
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect")
    for row in range(60):
        cut = padded[index[row], top[row] : top[row] + 32, left[row] : left[row] + 32]
        np.testing.assert_array_equal(ours[row].numpy(), cut[:, ::-1] if flip[row] else cut)


def test_bytes_are_normalised_channel_by_channel_into_channels_last():
    images = torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8).expand(2, 3, 4, 3).contiguous()
    floats = normalise(images)
    expected = [(value - mean) / deviation for value, mean, deviation in zip((0, 1, 0.2), MEAN, DEVIATION, strict=True)]
    torch.testing.assert_close(floats[1, :, 2, 3], torch.tensor(expected), rtol=0, atol=1e-6)
    assert floats.shape == (2, 3, 3, 4) and floats.is_contiguous(memory_format=torch.channels_last)


def test_a_hole_is_a_square_of_zeros():
    holed = cut_out(torch.ones(2, 3, 6, 6), torch.tensor([0, 3]), torch.tensor([2, 3]), 3)
    assert (holed == 0).sum((1, 2, 3)).tolist() == [27, 27]
    assert not holed[0, :, 0:3, 2:5].any() and not holed[1, :, 3:6, 3:6].any()


def test_draws_show_every_image_once_an_epoch_and_follow_the_seed():
    draws = draw(50, 3, size=32, hole=8, seed=1)
    for epoch in range(3):
        assert sorted(draws.index[epoch * 50 : epoch * 50 + 50].tolist()) == list(range(50))
    assert set(draws.top.tolist()) == set(range(9)) and draws.flip.any() and not draws.flip.all()
    assert 0 <= int(draws.hole_top.min()) and int(draws.hole_top.max()) <= 24
    assert torch.equal(draws.index, draw(50, 3, size=32, hole=8, seed=1).index)
    assert not torch.equal(draws.index, draw(50, 3, size=32, hole=8, seed=2).index)


def test_a_micro_batch_keeps_images_and_labels_together():
    images = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 32, 32, 3).contiguous()
    labels = torch.arange(10) * 10
    part = draw(10, 2, size=32, hole=0, seed=0).slice(8, 12)
    pixels, told = micro_batch(images, labels, part, hole=0, dtype=torch.float32)
    shown = (pixels[:, 0, 0, 0] * DEVIATION[0] + MEAN[0]) * 255
    assert shown.round().long().mul(10).tolist() == told.tolist() == (part.index * 10).tolist()

"""A batch in one piece of shared memory is the batch."""

import numpy as np
import pytest
import torch

from fleetx.data.packing import ALIGNMENT, empty_to_send, pack, unpack
from fleetx.engine.modules.nested_tensors import map_tensors

IMAGES = torch.from_numpy(np.arange(2 * 5 * 5 * 3, dtype=np.uint8).reshape(2, 5, 5, 3)).permute(0, 3, 1, 2)
BATCHES = {
    "images": (IMAGES, torch.tensor([3, 1])),
    "text": {"ids": torch.arange(12, dtype=torch.int16).view(3, 4), "mask": None, "labels": torch.tensor([True, False])},
    "nested": {"pair": [torch.tensor(1.5), (torch.zeros(0, 4), "a name", 7)]},
    "a tensor": torch.linspace(0, 1, 7, dtype=torch.float64),
    "nothing": {"ids": None},
}


def tensors_of(batch):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)
    return found


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_unpacked_is_what_was_packed(batch):
    unpacked = unpack(pack(batch))
    assert repr(unpacked) == repr(batch)  # containers, names and types
    torch.testing.assert_close(tensors_of(unpacked), tensors_of(batch), rtol=0, atol=0)


def test_it_is_one_shared_buffer_with_aligned_views_that_keep_their_strides():
    packed = pack(BATCHES["images"])
    assert packed.buffer.is_shared() and packed.buffer.dtype == torch.uint8
    images, labels = unpack(packed)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.data_ptr() - images.data_ptr()) % ALIGNMENT == 0
    images[0, 0, 0, 0] = 99
    assert packed.buffer[0] == 99


def test_a_view_with_gaps_is_packed_without_them():
    every_other = torch.arange(20).view(4, 5)[:, ::2]
    packed = pack(every_other)
    torch.testing.assert_close(unpack(packed), every_other, rtol=0, atol=0)
    assert packed.buffer.nbytes == every_other.nbytes


def test_a_tensor_made_in_shared_memory_stays_there_and_the_rest_goes_behind_it(monkeypatch):
    monkeypatch.setattr("fleetx.data.packing.in_worker", lambda: True)
    large = empty_to_send((2, 5, 5, 3), torch.uint8, room=16 + 2 * ALIGNMENT).copy_(IMAGES.permute(0, 2, 3, 1))
    batch = (large.permute(0, 3, 1, 2), torch.tensor([3, 1]))
    packed = pack(batch)
    assert packed.buffer.data_ptr() == large.data_ptr()
    torch.testing.assert_close(unpack(packed), batch, rtol=0, atol=0)


def test_without_room_behind_it_a_shared_tensor_is_copied_with_the_others(monkeypatch):
    monkeypatch.setattr("fleetx.data.packing.in_worker", lambda: True)
    large = empty_to_send((64,), torch.uint8, room=0).fill_(7)
    packed = pack([large, torch.arange(3)])
    assert packed.buffer.data_ptr() != large.data_ptr()
    torch.testing.assert_close(unpack(packed), [large, torch.arange(3)], rtol=0, atol=0)


def test_outside_a_worker_nothing_is_shared():
    assert not empty_to_send((4,), torch.uint8, room=64).is_shared()

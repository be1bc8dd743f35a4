"""Fingerprints: equal bits give equal ones, and every change of a bit, a place or a length gives another.

`on_cpu` is SHA-256. `as_on_gpu` is the mixing that runs on a device; its arithmetic is that of whole numbers, the same on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fleetx.dist.fingerprint import _mix, _shift, fingerprint, mixed

Print = Callable[[Tensor], int]


def on_cpu(tensor: Tensor) -> int:
    return int(fingerprint([tensor]))


def as_on_gpu(tensor: Tensor) -> int:
    return int(mixed([tensor]))


both = pytest.mark.parametrize("printed", [on_cpu, as_on_gpu])


def values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# --- equal --------------------------------------------------------------------------------------------------------------


@both
def test_equal_bits_have_equal_fingerprints_wherever_they_lie(printed: Print) -> None:
    base = values(60).view(3, 4, 5)
    strided = torch.zeros(3, 4, 10)[..., ::2].copy_(base)
    turned = base.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous() and not turned.is_contiguous()
    assert {printed(t) for t in (base, base.clone(), strided, turned, base.view(60))} == {printed(base)}


@both
def test_a_view_that_begins_at_an_odd_element_has_the_fingerprint_of_its_bits(printed: Print) -> None:
    bucket = values(61)
    assert printed(bucket[1:]) == printed(bucket[1:].clone())


@both
def test_a_nan_with_the_same_bits_is_the_same(printed: Print) -> None:
    assert printed(torch.tensor([float("nan"), 1.0])) == printed(torch.tensor([float("nan"), 1.0]))


@both
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.float64], ids=str
)
def test_every_number_type_and_shape_has_a_fingerprint(printed: Print, dtype: torch.dtype) -> None:
    ones = torch.ones(3, 5).to(dtype)
    prints = [printed(ones), printed(ones[0]), printed(ones[0, 0]), printed(ones[:0])]
    assert len(set(prints)) == 4


def test_a_fingerprint_is_a_number_on_the_tensors_own_device() -> None:
    found = fingerprint([values(5)])
    assert (found.dtype, found.shape, found.device.type) == (torch.int64, (), "cpu")
    assert fingerprint([]).dtype == torch.int64


# --- different ----------------------------------------------------------------------------------------------------------


@both
def test_each_of_10_000_flipped_bits_changes_it(printed: Print) -> None:
    tensor, chance = values(101), random.Random(1)
    data = tensor.view(torch.uint8)  # the memory itself
    original = printed(tensor)
    for _ in range(10_000):
        place, bit = chance.randrange(data.numel()), chance.randrange(8)
        data[place] ^= 1 << bit
        assert printed(tensor) != original, (place, bit)
        data[place] ^= 1 << bit
    assert printed(tensor) == original


@both
def test_all_flips_of_a_small_tensor_give_fingerprints_of_their_own(printed: Print) -> None:
    tensor = values(16)
    data, prints = tensor.view(torch.uint8), {printed(tensor)}
    for place in range(64):
        for bit in range(8):
            data[place] ^= 1 << bit
            prints.add(printed(tensor))
            data[place] ^= 1 << bit
    assert len(prints) == 1 + 64 * 8


@both
def test_every_swap_of_two_elements_changes_it(printed: Print) -> None:
    tensor = values(40).double()  # 8 bytes each: whole words change places
    original = printed(tensor)
    for i in range(40):
        for j in range(i):
            swapped = tensor.clone()
            swapped[[i, j]] = swapped[[j, i]]
            assert printed(swapped) != original, (i, j)


@both
def test_every_pair_of_flipped_signs_changes_it(printed: Print) -> None:
    tensor = values(40).double()
    original = printed(tensor)
    for i in range(40):
        for j in range(i):
            flipped = tensor.clone()
            flipped[[i, j]] *= -1
            assert printed(flipped) != original, (i, j)


@both
def test_what_moves_from_one_element_to_another_changes_it(printed: Print) -> None:
    """A sum stays the same, an exclusive or of two equal changes too."""
    words = torch.arange(64)
    original = printed(words)
    moved, masked = words.clone(), words.clone()
    moved[3] += 5
    moved[40] -= 5
    masked[3] ^= 1 << 62
    masked[40] ^= 1 << 62
    assert printed(moved) != original and printed(masked) != original


@both
def test_zeros_at_the_end_change_it_by_whole_words(printed: Print) -> None:
    tensor = values(8)
    longer = [torch.cat([tensor, torch.zeros(2 * extra)]) for extra in range(1, 6)]
    assert len({printed(t) for t in (tensor, *longer)}) == 6


@both
def test_zero_bytes_at_the_end_change_it(printed: Print) -> None:
    data = torch.arange(13, dtype=torch.uint8)
    longer = [torch.cat([data, torch.zeros(extra, dtype=torch.uint8)]) for extra in range(1, 9)]
    assert len({printed(t) for t in (data, *longer)}) == 9


@both
def test_a_single_zero_and_nothing_at_all_differ(printed: Print) -> None:
    assert printed(torch.zeros(1, dtype=torch.float64)) != printed(torch.empty(0, dtype=torch.float64))


@both
def test_all_zeros_of_different_lengths_differ(printed: Print) -> None:
    assert len({printed(torch.zeros(2 * words)) for words in range(1, 50)}) == 49


@both
def test_minus_zero_is_not_zero(printed: Print) -> None:
    assert printed(torch.zeros(4)) != printed(-torch.zeros(4))


@both
def test_one_element_of_a_column_has_the_fingerprint_of_its_value(printed: Print) -> None:
    assert printed(torch.arange(5.0).view(1, 5)[:, 3]) == printed(torch.tensor([3.0]))


# --- several tensors, and the pieces of the mixing ----------------------------------------------------------------------


def test_the_order_of_several_tensors_counts() -> None:
    a, b = values(5, 1), values(5, 2)
    assert len({int(fingerprint([a, b])), int(fingerprint([b, a])), int(fingerprint([a])), int(fingerprint([b]))}) == 4


@both
@pytest.mark.parametrize("limit_bytes", [1, 50, 400, 5000])
def test_small_tensors_are_joined_and_large_ones_cut_and_each_of_them_counts(
    printed: Print, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetx.dist.fingerprint._CPU_BYTES", limit_bytes)
    monkeypatch.setattr("fleetx.dist.fingerprint._GPU_BYTES", limit_bytes)
    of_all = fingerprint if printed is on_cpu else mixed
    tensors = [values(count, seed=count) for count in (3, 1, 200, 7, 50)]
    original = int(of_all(tensors))
    assert int(of_all([t.clone() for t in tensors])) == original
    for i in range(len(tensors)):
        changed = [t.clone() for t in tensors]
        changed[i][-1] = -changed[i][-1]
        assert int(of_all(changed)) != original


def test_shifts_to_the_right_bring_in_zeros() -> None:
    words = torch.tensor([-1, -(2**63), 2**62, 1])
    for bits in (1, 27, 30, 31, 63):
        assert [int(w) % 2**64 for w in _shift(words, bits)] == [(int(w) % 2**64) >> bits for w in words]


def test_mixing_is_that_of_splitmix64() -> None:
    def reference(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
        return word ^ (word >> 31)

    words = [random.Random(3).getrandbits(64) for _ in range(100)]
    mixed = _mix(torch.tensor([w - 2**64 if w >= 2**63 else w for w in words]))
    assert [int(w) % 2**64 for w in mixed] == [reference(w) for w in words]


def test_a_flipped_bit_moves_about_half_of_the_bits() -> None:
    words = torch.randint(-(2**62), 2**62, (64,), generator=torch.Generator().manual_seed(0))
    moved = []
    for bit in range(63):
        changed = _mix(words) ^ _mix(words ^ (1 << bit))
        moved += [(int(w) % 2**64).bit_count() for w in changed]
    assert 31 < sum(moved) / len(moved) < 33
    assert min(moved) > 10

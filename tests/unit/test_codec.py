"""Blockwise integers: what is received, what is kept, and how many bytes travel."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetx.dist import codec
from fleetx.dist.codec import Codec
from tests.helpers.integers_reference import blockwise

BITS = pytest.mark.parametrize("bits", [8, 4])
LENGTHS = pytest.mark.parametrize("numel", [1, 15, 16, 17, 100, 160])


def a_row(numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of many sizes, from block to block and inside a block."""
    random = torch.Generator().manual_seed(numel)
    sizes = torch.logspace(-6, 3, numel, dtype=dtype)
    return torch.randn(numel, generator=random, dtype=dtype) * sizes


def sent(row: Tensor, codec: Codec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of a row, what they mean, and what they miss."""
    wire = torch.full((codec.nbytes(row.numel()),), 255, dtype=torch.uint8, device=row.device)
    kept, received = torch.empty_like(row), torch.empty_like(row)
    codec.encode(row, wire, kept=kept)
    codec.decode(wire, received)
    return wire, received, kept


@BITS
@LENGTHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_definition_also_where_the_last_block_is_not_full(bits: int, numel: int, dtype: torch.dtype) -> None:
    row = a_row(numel, dtype)
    _, received, kept = sent(row, Codec(bits, 16))
    wanted = blockwise(row.numpy(), bits=bits, block=16)
    np.testing.assert_array_equal(received.numpy(), wanted[0])
    np.testing.assert_array_equal(kept.numpy(), wanted[1])


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_received_and_what_is_kept_are_the_row_to_the_bit(bits: int, dtype: torch.dtype) -> None:
    row = torch.cat([a_row(4000, dtype), torch.arange(-300, 300, dtype=dtype) / 2])  # with ties, and quotients near them
    _, received, kept = sent(row, Codec(bits, 256))
    np.testing.assert_array_equal(received.numpy().astype(np.longdouble) + kept.numpy(), row.numpy())
    assert kept.any()


@BITS
def test_no_value_is_off_by_more_than_half_a_scale(bits: int) -> None:
    row, largest = a_row(4096, torch.float32), {8: 127, 4: 7}[bits]
    _, _, kept = sent(row, Codec(bits, 256))
    scales = row.view(-1, 256).abs().amax(1) / largest * (1 + 2**-8)
    assert bool((kept.view(-1, 256).abs() <= scales[:, None] / 2).all())


@BITS
def test_a_row_worked_in_stretches_equals_it_worked_at_once(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = a_row(1000, torch.float32)
    whole = sent(row, Codec(bits, 32))
    monkeypatch.setattr(codec, "STRETCH", 96)
    for part, wanted in zip(sent(row, Codec(bits, 32)), whole, strict=True):
        assert torch.equal(part, wanted)


@BITS
def test_what_is_missed_may_take_the_place_of_the_row(bits: int) -> None:
    row = a_row(100, torch.float32)
    wire, _, kept = sent(row, Codec(bits, 16))
    again = torch.empty_like(wire)
    Codec(bits, 16).encode(row, again, kept=row)
    assert torch.equal(row, kept) and torch.equal(again, wire)


@BITS
def test_values_are_added_as_they_are_decoded(bits: int) -> None:
    row, start = a_row(100, torch.float32), torch.randn(100)
    wire, received, _ = sent(row, Codec(bits, 16))
    total = start.clone()
    Codec(bits, 16).add_decoded(wire, total)
    assert torch.equal(total, start + received)


def test_bytes_follow_the_formula() -> None:
    million = 2**20
    assert Codec(8, 256).nbytes(million) * 8 / million == 8 + 16 / 256
    assert Codec(4, 256).nbytes(million) * 8 / million == 4 + 16 / 256
    assert Codec(8, 256).nbytes(1) == Codec(8, 256).nbytes(256) == 264  # 258, and 8-byte steps
    assert Codec(4, 256).nbytes(257) == 264  # 2 * 130
    assert Codec(8, 256).nbytes(0) == 0


@BITS
def test_a_block_of_zeros_sends_zeros(bits: int) -> None:
    wire, received, kept = sent(torch.zeros(40), Codec(bits, 16))
    assert not received.any() and not kept.any()
    assert bool(Codec(bits, 16).are_finite(wire, 40))


@BITS
def test_numbers_too_small_for_a_scale_are_kept(bits: int) -> None:
    row = torch.full((16,), 1e-40)
    _, received, kept = sent(row, Codec(bits, 16))
    assert not received.any() and torch.equal(kept, row)


@BITS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_comes_out_so_and_no_other(bits: int, bad: float) -> None:
    row = a_row(48, torch.float32)
    row[20] = bad
    wire, received, kept = sent(row, Codec(bits, 16))
    assert received[16:32].isnan().all()
    assert received[:16].isfinite().all() and received[32:].isfinite().all()
    assert not bool(Codec(bits, 16).are_finite(wire, 48))
    assert (~kept.isfinite()).nonzero().flatten().tolist() == [20], "the culprit can still be named"
    Codec(bits, 16).zero_nonfinite(wire, 48)
    again = torch.empty_like(row)
    Codec(bits, 16).decode(wire, again)
    assert torch.equal(again[:16], received[:16]) and not again[16:32].any()


@BITS
def test_float64_beyond_the_range_of_scales_is_not_finite(bits: int) -> None:
    assert sent(torch.full((16,), 1e300, dtype=torch.float64), Codec(bits, 16))[1].isnan().all()


@BITS
def test_an_empty_row_has_no_bytes(bits: int) -> None:
    wire, received, kept = sent(torch.empty(0), Codec(bits, 16))
    assert wire.numel() == received.numel() == kept.numel() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BITS
@pytest.mark.parametrize("block", [256, 24])
def test_a_gpu_gives_the_bits_of_a_cpu(bits: int, block: int) -> None:
    """By kernels, and, with a block that is no power of two, by list operations."""
    row = a_row(5000, torch.float32)
    row[4000] = float("inf")
    for ours, theirs in zip(sent(row.cuda(), Codec(bits, block)), sent(row, Codec(bits, block)), strict=True):
        assert torch.equal(ours.cpu().nan_to_num(), theirs.nan_to_num())

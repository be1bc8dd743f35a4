"""The largest entries of each chunk: what is received, what is kept, and how many bytes travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetx.dist.predicted_cost import Link
from fleetx.local_sgd.sparse_codec import SparseCodec, largest_of_each, packed, unpacked
from fleetx.strategies.localsgd import LocalSGD
from tests.helpers.localsgd_compressed import sparse

VALUE_BITS = pytest.mark.parametrize("bits", [2, 4, 8, 32])
NAN, INF = float("nan"), float("inf")


def sent(row: Tensor, codec: SparseCodec) -> tuple[Tensor, Tensor]:
    """Return what is received in the place of a row, and what is kept."""
    wire = torch.full((codec.nbytes(row.numel()),), 255, dtype=torch.uint8)
    kept, received = row.clone(), torch.zeros_like(row)
    codec.encode(kept, wire, kept=kept)
    codec.add_decoded(wire, received)
    return received, kept


def a_row(numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of many sizes, from chunk to chunk and inside a chunk, and some zeros."""
    random = torch.Generator().manual_seed(numel)
    sizes = torch.logspace(-6, 3, numel, dtype=dtype)
    row = torch.randn(numel, generator=random, dtype=dtype) * sizes
    row[::7] = 0
    return row


@VALUE_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("top_k", "chunk", "numel"), [(3, 8, 26), (1, 2, 7), (5, 16, 15), (16, 16, 40), (64, 4096, 9000), (7, 64, 1)]
)
def test_equals_the_definition(bits: int, top_k: int, chunk: int, numel: int, dtype: torch.dtype) -> None:
    row = a_row(numel, dtype)
    received, kept = sent(row, SparseCodec(top_k, chunk, bits))
    wanted = sparse(top_k, chunk, bits)(row.numpy())
    if bits == 2 and dtype == torch.float32:  # means of float32 may round to another 4 binary digits
        np.testing.assert_allclose(received.numpy(), wanted, rtol=2**-4, atol=0)
    else:
        np.testing.assert_array_equal(received.numpy(), wanted)
        np.testing.assert_array_equal(kept.numpy(), row.numpy() - wanted)


@VALUE_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_received_and_what_is_kept_are_the_row_to_the_bit(bits: int, dtype: torch.dtype) -> None:
    heavy = a_row(3000, dtype) ** 3  # a few entries hold almost all
    for row in (a_row(5000, dtype), heavy, torch.arange(-300, 300, dtype=dtype) / 2):
        received, kept = sent(row, SparseCodec(20, 256, bits))
        np.testing.assert_array_equal(received.numpy().astype(np.longdouble) + kept.numpy(), row.numpy())
        assert received.any() and kept.any()


@VALUE_BITS
def test_each_round_leaves_less_and_in_the_end_everything_has_been_sent(bits: int) -> None:
    row, codec = a_row(600), SparseCodec(8, 64, bits)
    left, norms, arrived = row.clone(), [], torch.zeros_like(row)
    for _ in range(60):
        received, left = sent(left, codec)
        arrived += received
        norms.append(float(left.norm()))
    assert norms == sorted(norms, reverse=True) and norms[-1] < 1e-3 * float(row.norm())
    torch.testing.assert_close(arrived + left, row, rtol=0, atol=1e-9)


def test_exactly_k_are_taken_ties_at_the_lower_place_and_of_a_short_chunk_in_proportion() -> None:
    chunks = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 2.0, -3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert largest_of_each(chunks, 2).tolist() == [[0, 1], [1, 2], [0, 1]]
    row = torch.arange(1.0, 23.0)  # two chunks of 8, and 6 entries, of which ceil(3 * 6 / 8) = 3
    received, _ = sent(row, SparseCodec(3, 8, 32))
    assert received.nonzero().flatten().tolist() == [5, 6, 7, 13, 14, 15, 19, 20, 21]


def test_of_two_sizes_each_entry_takes_the_nearer_and_what_is_too_small_for_both_is_not_sent() -> None:
    """Of 1, 8, 8, 10, 13 the mean is 8: above it are 10 and 13, so that high = 11.5 -> 12 and low = 17 / 3 = 15.1 / 32 * 12."""
    row = torch.tensor([13.0, 0.0, -8.0, 1.0, 0.0, 8.0, -10.0, 0.0], dtype=torch.float64)
    received, kept = sent(row, SparseCodec(5, 8, 2))
    low = 15 / 32 * 12
    assert received.tolist() == [12.0, 0.0, -low, 0.0, 0.0, low, -12.0, 0.0]
    assert kept.tolist() == [1.0, 0.0, low - 8, 1.0, 0.0, 8 - low, 2.0, 0.0]


@VALUE_BITS
def test_zeros_stay_zeros(bits: int) -> None:
    row = torch.zeros(64)
    row[[3, 40]] = torch.tensor([2.0, -2.0])
    for values in (row, torch.zeros(64)):
        received, kept = sent(values, SparseCodec(8, 16, bits))
        assert bool((received[values == 0] == 0).all()) and bool((kept[values == 0] == 0).all())
        torch.testing.assert_close(received, values, rtol=2**-8, atol=0)


@VALUE_BITS
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_told_to_all_and_other_chunks_do_not_notice(bits: int, bad: float) -> None:
    row = a_row(32)
    clean, _ = sent(row, SparseCodec(3, 16, bits))
    row[20] = bad
    received, _ = sent(row, SparseCodec(3, 16, bits))
    torch.testing.assert_close(received[:16], clean[:16], rtol=0, atol=0)
    assert not bool(received[20].isfinite())


def test_what_is_received_is_added() -> None:
    codec, row = SparseCodec(2, 8, 8), torch.randn(8)
    wire = torch.empty(codec.nbytes(8), dtype=torch.uint8)
    codec.encode(row, wire)
    once, twice = torch.zeros(8), torch.ones(8)
    codec.add_decoded(wire, once)
    codec.add_decoded(wire, twice)
    torch.testing.assert_close(twice, once + 1, rtol=0, atol=0)


@pytest.mark.parametrize(("bits", "wanted"), [(2, 0.2227), (4, 0.2539), (8, 0.3164), (32, 0.6875)])
def test_so_many_bits_travel_for_each_entry(bits: int, wanted: float) -> None:
    """64 of 4,096: 12 bits for a place, so many for a value, 16 for a chunk."""
    assert 8 * SparseCodec(64, 4096, bits).nbytes(2**17) / 2**17 == pytest.approx(wanted, abs=5e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 12, 16])
def test_packed_numbers_come_back_and_take_their_bits(bits: int) -> None:
    numbers = torch.arange(37) * 2654435761 % 2**bits
    row = packed(numbers, bits)
    assert len(row) == -(-37 * bits // 8) and torch.equal(unpacked(row, bits, 37), numbers)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_round_is_priced_at_the_bytes_that_go_from_each_rank_to_all_others(ranks: int) -> None:
    part = LocalSGD(k_steps=30, top_k=64, value_bits=2, error_decay=0.95)
    priced = part.wire_cost([(2**20,)], Link(ranks, 1e6)).bytes_sent
    assert priced == pytest.approx((ranks - 1) * SparseCodec(64, 4096, 2).nbytes(2**20), rel=1e-12)
    assert part.label() == "localsgd 30 top 64/4096 in 2 bits"

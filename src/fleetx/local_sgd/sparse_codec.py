"""The largest entries of each chunk of a row, as packed bytes: their places and their values.

    chunk    of `chunk` entries exactly `top_k` are taken, those with the largest absolute values, ties to the lower place;
             of a shorter last one in proportion, rounded up
    places   log2(chunk) bits each, ascending
    values   32 bits: float32
             8 or 4:  an integer of at most 127 (7) times the chunk's scale, which is its largest value / 127 (/ 7), in bfloat16
             2:       a sign, and which of the chunk's two sizes; both of these together take 16 bits
    bytes    places, values, scales of all full chunks, then those of the shorter one

The two sizes are the means of the taken entries above their mean and of the others: `high`, rounded to 4 binary digits, and
`low`, a multiple of high / 32. An entry takes the nearer one. One of less than low / 2 would be moved further from what it is: it
is not sent, and its slot repeats the place before it, which says that it is empty. So zeros stay zeros.

What was sent is exact in float32, and so is what was kept: entry and value are within a factor of 2 of each other, or else the
value has so few binary digits that the difference has no rounding. Sent + kept is the entry, to the bit. A chunk with a NaN or an
infinity sends NaN or infinity: all that receive it know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ..dist.codec import LARGEST, scales_of

VALUE_BITS = (2, 4, 8, 32)
SCALE_BYTES, RATIOS = 2, 32
EXPONENT_SHIFT = 20
"""Of the bits of a float32, those from here on are its exponent and 3 digits of its fraction; the sign is 0."""


@final
@dataclass(frozen=True, slots=True)
class SparseCodec:
    """How the largest entries of a row become bytes. Pure functions: no state, and the same bits for the same values."""

    top_k: int
    """Entries taken of each chunk."""
    chunk: int
    """Entries of a chunk: a power of two."""
    value_bits: int
    """2, 4, 8 or 32."""

    @property
    def place_bits(self) -> int:
        return self.chunk.bit_length() - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a row of so many entries."""
        return sum(part.nbytes(self) for part in self._parts(numel))

    def encode(self, row: Tensor, wire: Tensor, *, kept: Tensor | None = None) -> None:
        """Write the largest entries of a row of float32 or float64 into `wire`, and the row without what was sent into `kept`,
        which may be the row."""
        if kept is not None and kept is not row:
            kept.copy_(row)
        for part, at in self._located(row.numel()):
            chunks = row[part.start : part.start + part.chunks * part.length].view(part.chunks, part.length)
            places = largest_of_each(chunks, part.taken)
            values = chunks.gather(1, places)
            places, codes, scales = self._coded(values, places, empty=part.length)
            sent = self._decoded(codes, scales, places, row.dtype)
            self._write(part, wire[at], places, codes, scales)
            if kept is not None:
                rest = kept[part.start : part.start + chunks.numel()].view_as(chunks)
                rest.scatter_add_(1, places, sent.neg_())  # empty slots add 0

    def add_decoded(self, wire: Tensor, out: Tensor) -> None:
        """Add the entries of `wire` to a row of float32 or float64."""
        for part, at in self._located(out.numel()):
            places, codes, scales = self._read(part, wire[at])
            chunks = out[part.start : part.start + part.chunks * part.length].view(part.chunks, part.length)
            chunks.scatter_add_(1, places, self._decoded(codes, scales, places, out.dtype))

    # --- values -----------------------------------------------------------------------------------------------------

    def _coded(self, values: Tensor, places: Tensor, *, empty: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return places, codes and scales: the codes are float32 or integers, the scales 16 bits as integers; a column each."""
        if self.value_bits == 32:
            return places, values.float(), places.new_zeros(len(places), 0)
        sizes = values.abs()
        if self.value_bits == 2:
            return _two_sizes(values, sizes, places, empty=empty)
        scales = scales_of(sizes.amax(1, keepdim=True), self.value_bits)
        divisor = torch.where(scales == 0, 1.0, scales).to(values.dtype)
        codes = (values / divisor).nan_to_num_(0.0).round_().long() + LARGEST[self.value_bits]
        return places, codes, scales.view(torch.int16).long() & 0xFFFF

    def _decoded(self, codes: Tensor, scales: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        if self.value_bits == 32:
            return codes.to(dtype)
        if self.value_bits > 2:
            of_chunk = scales.to(torch.int16).view(torch.bfloat16).to(dtype)
            return (codes - LARGEST[self.value_bits]).to(dtype) * of_chunk
        low, high = _sizes_of(scales)
        sent = torch.where(codes & 1 == 1, high, low) * (1 - (codes & 2))
        sent[:, 1:].masked_fill_(places[:, 1:] == places[:, :-1], 0.0)
        return sent.to(dtype)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _parts(self, numel: int) -> list[_Part]:
        full, rest = divmod(numel, self.chunk)
        parts = [_Part(0, full, self.chunk, self.top_k)] if full else []
        return parts + ([_Part(full * self.chunk, 1, rest, -(-self.top_k * rest // self.chunk))] if rest else [])

    def _located(self, numel: int) -> Iterator[tuple[_Part, slice]]:
        begin = 0
        for part in self._parts(numel):
            yield part, slice(begin, begin := begin + part.nbytes(self))

    def _write(self, part: _Part, wire: Tensor, places: Tensor, codes: Tensor, scales: Tensor) -> None:
        in_places, in_values, in_scales = wire.split(part.sections(self))
        in_places.copy_(packed(places.flatten(), self.place_bits))
        whole = self.value_bits == 32
        in_values.copy_(codes.flatten().view(torch.uint8) if whole else packed(codes.flatten(), self.value_bits))
        in_scales.copy_(scales.to(torch.int16).flatten().view(torch.uint8))

    def _read(self, part: _Part, wire: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_places, in_values, in_scales = wire.split(part.sections(self))
        places = unpacked(in_places, self.place_bits, part.slots).view(part.chunks, part.taken)
        # Cloned, since a section may begin at an address that its type is not aligned to.
        if self.value_bits == 32:
            codes = in_values.clone().view(torch.float32)
        else:
            codes = unpacked(in_values, self.value_bits, part.slots)
        scales = in_scales.clone().view(torch.int16).long() & 0xFFFF
        return places, codes.view(part.chunks, part.taken), scales.view(part.chunks, -1)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks of one length."""

    start: int
    chunks: int
    length: int
    taken: int

    @property
    def slots(self) -> int:
        return self.chunks * self.taken

    def sections(self, codec: SparseCodec) -> list[int]:
        """Return the bytes of places, values and scales."""
        scales = 0 if codec.value_bits == 32 else self.chunks * SCALE_BYTES
        return [-(-self.slots * codec.place_bits // 8), -(-self.slots * codec.value_bits // 8), scales]

    def nbytes(self, codec: SparseCodec) -> int:
        return sum(self.sections(codec))


def largest_of_each(chunks: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest absolute values of each row, ascending; ties go to the lower place, and what is
    not a number counts as infinite."""
    sizes = chunks.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    bound = sizes.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    taken = sizes >= bound
    if int(taken.sum()) != len(chunks) * count:  # several entries of some chunk are as large as its smallest one taken
        above, equal = sizes > bound, sizes == bound
        taken = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    return taken.nonzero()[:, 1].view(len(chunks), count)


def _two_sizes(values: Tensor, sizes: Tensor, places: Tensor, *, empty: int) -> tuple[Tensor, Tensor, Tensor]:
    mean = sizes.mean(1, keepdim=True)
    above = sizes > mean
    count, of_above = above.sum(1, keepdim=True), torch.where(above, sizes, 0.0).sum(1, keepdim=True)
    high = torch.where(count > 0, of_above / count, mean)
    low = torch.where(above, 0.0, sizes).sum(1, keepdim=True) / (sizes.shape[1] - count).clamp_(min=1)
    digits = (high.float().view(torch.int32) + (1 << (EXPONENT_SHIFT - 1))) >> EXPONENT_SHIFT
    rounded = (digits << EXPONENT_SHIFT).view(torch.float32)
    ratio = (low / rounded * RATIOS).nan_to_num_(1.0).round_().clamp_(1, RATIOS).long() - 1
    scales = (digits.long() & 0x7FF) * RATIOS + ratio
    low, high = (size.to(sizes.dtype) for size in _sizes_of(scales))
    # Slots that are not sent come last, and repeat the place of the last that is.
    is_sent = ~(2 * sizes < low)
    places, order = torch.where(is_sent, places, empty).sort(dim=1, stable=True)
    places = torch.minimum(places, torch.where(places < empty, places, 0).amax(1, keepdim=True))
    codes = (2 * sizes > low + high).long() + 2 * (values < 0).long()
    return places, codes.gather(1, order), scales


def _sizes_of(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sizes of each chunk, in float32."""
    high = ((scales // RATIOS).int() << EXPONENT_SHIFT).view(torch.float32)
    return high * ((scales % RATIOS + 1).float() / RATIOS), high


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers of so many bits each as a row of bytes, the lowest bit first."""
    if bits == 8:
        return numbers.to(torch.uint8)
    row = ((numbers.unsqueeze(1) >> torch.arange(bits, device=numbers.device)) & 1).to(torch.uint8).flatten()
    row = torch.nn.functional.pad(row, (0, -len(row) % 8)).view(-1, 8)
    return (row << torch.arange(8, dtype=torch.uint8, device=row.device)).sum(1, dtype=torch.uint8)


def unpacked(row: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` numbers of so many bits each."""
    if bits == 8:
        return row[:count].long()
    each = (row.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=row.device)) & 1
    of_number = each.flatten()[: count * bits].view(count, bits).long()
    return (of_number << torch.arange(bits, device=row.device)).sum(1)

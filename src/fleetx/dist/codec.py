"""Blockwise integers: a row of floats as 8 or 4 bits each, and one scale for every block, in one row of bytes.

    scale   the block's largest absolute value / 127 (of 4 bits: / 7), rounded to bfloat16: the range of float32 in two bytes
    number  the nearest integer to value / scale, ties to even
    bytes   all scales, then all integers, block after block; the last block is filled up with zeros

A product of such an integer and such a scale has at most 15 bits, so that it is exact in float32, and with a fused addition too.
With `kept` what was not sent is exact as well: |value| > scale / 2 wherever the integer is not 0, so that value and product are
within a factor of 2 and their difference has no rounding (Sterbenz). Decoded + kept is the value, to the bit.

A block with a NaN or an infinity has the scale NaN and decodes to NaN everywhere: all that receive it know. It keeps its values,
so that those that are not finite can still be named. A block whose scale would be below the normal numbers of float32 has the
scale 0, sends zeros and keeps everything.

On a GPU float32 goes by Triton kernels (codec_triton.py), which give the same bits; all else by the list operations here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from .triton_support import has_triton, runs_here

if TYPE_CHECKING:
    from types import ModuleType

LARGEST = {8: 127, 4: 7}
"""The largest integer, by bits."""
SCALE_BYTES, ALIGNMENT = 2, 8
STRETCH = 2**17
"""Elements processed at a time on a CPU: a few arrays of this length fit in a core's cache."""
PROGRAM, LARGEST_TILE = 2048, 4096
"""Elements of one program of a kernel, and of the largest block that one takes."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@final
@dataclass(frozen=True, slots=True)
class Codec:
    """How rows of floats become bytes. Pure functions of their arguments: no state, and the same bits for the same values."""

    bits: int
    """8 or 4."""
    block: int
    """Elements that share a scale; even."""

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many elements: a multiple of 8, so that rows that follow each other are aligned."""
        used = self.blocks(numel) * (SCALE_BYTES + self.block * self.bits // 8)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def encode(self, row: Tensor, wire: Tensor, *, kept: Tensor | None = None) -> None:
        """Write a row of float32 or float64 as bytes into `wire`, and what these miss into `kept`, which may be the row."""
        scales, numbers = self._split(wire, row.numel())
        wire[scales.nbytes + numbers.nbytes :].zero_()
        if (kernels := self._kernels_for(row)) is not None:
            self._launch(kernels.encode, row.numel(), row, scales, numbers, row if kept is None else kept, flag=kept is not None)
            return
        scratch = row.new_empty(self._most(row))
        for blocks, values in self._stretches(row):
            held, products = values.numel(), scratch[: values.numel()]
            if held % self.block:
                products = scratch[: self.block].zero_()
                products[:held].copy_(values)
                values = products.clone()
            of_blocks, products = values.view(-1, self.block), products.view(-1, self.block)
            largest = torch.abs(of_blocks, out=products).amax(1, keepdim=True)  # faster than a norm, or smallest and largest
            scale = scales_of(largest, self.bits)
            scales[blocks].copy_(scale.squeeze(1))
            factor = scale.to(row.dtype).nan_to_num_(0.0)
            torch.div(of_blocks, torch.where(factor == 0, 1.0, factor), out=products).round_()
            self._pack(products, numbers[blocks])
            if kept is not None:
                at = slice(blocks.start * self.block, blocks.start * self.block + held)
                torch.sub(values.view(-1)[:held], products.mul_(factor).view(-1)[:held], out=kept[at])

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Write the values of `wire` into a row of any floating type."""
        if (kernels := self._kernels_for(out)) is not None:
            self._launch(kernels.decode, out.numel(), *self._split(wire, out.numel()), out, flag=False)
            return
        for at, products in self._products(wire, out):
            at.copy_(products)

    def add_decoded(self, wire: Tensor, out: Tensor) -> None:
        """Add the values of `wire` to a row of float32 or float64."""
        if (kernels := self._kernels_for(out)) is not None:
            self._launch(kernels.decode, out.numel(), *self._split(wire, out.numel()), out, flag=True)
            return
        for at, products in self._products(wire, out):
            at.add_(products)

    def zero_nonfinite(self, wire: Tensor, numel: int) -> None:
        """Let blocks that are not finite decode to zeros, where what they are is told in another way."""
        self._split(wire, numel)[0].nan_to_num_(0.0)

    def are_finite(self, wire: Tensor, numel: int) -> Tensor:
        """Return whether all values of `wire` are finite, as a tensor on its device."""
        return self._split(wire, numel)[0].isfinite().all()

    # --- on a GPU ---------------------------------------------------------------------------------------------------

    def _kernels_for(self, row: Tensor) -> ModuleType | None:
        fits = self.block & (self.block - 1) == 0 and self.block <= LARGEST_TILE
        if row.numel() == 0 or row.dtype != torch.float32 or not (fits and has_triton() and runs_here(row.device)):
            return None
        from . import codec_triton  # Triton is imported only where it is used

        return codec_triton

    def _launch(self, kernel: Any, numel: int, *rows: Tensor, flag: bool) -> None:
        """Launch a kernel over so many values. `flag`: whether it keeps what it misses, or adds."""
        count, some = self.blocks(numel), max(1, PROGRAM // self.block)
        as_words = {torch.uint8: torch.int8, torch.bfloat16: torch.int16}
        words = [row.view(as_words.get(row.dtype, row.dtype)) for row in rows]
        kernel[(-(-count // some),)](*words, numel, count, LARGEST[self.bits], self.block // 2, some, flag)

    # --- layout -----------------------------------------------------------------------------------------------------

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """View the scales, and the integers as one row of bytes for each block."""
        blocks, width = self.blocks(numel), self.block * self.bits // 8
        numbers = wire[blocks * SCALE_BYTES :][: blocks * width].view(blocks, width)
        return wire[: blocks * SCALE_BYTES].view(torch.bfloat16), numbers

    def _most(self, row: Tensor) -> int:
        """Return how many elements are processed at a time: on a GPU a few large kernels are faster than many small ones."""
        at_once = self.blocks(row.numel()) if row.device.type != "cpu" else max(1, STRETCH // self.block)
        return min(at_once, self.blocks(row.numel())) * self.block

    def _stretches(self, row: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Cut a row into stretches of whole blocks, and the last block where it is not full."""
        most, full = self._most(row), row.numel() // self.block * self.block
        for begin in range(0, full, most or 1):
            end = min(begin + most, full)
            yield slice(begin // self.block, end // self.block), row[begin:end]
        if full < row.numel():
            yield slice(full // self.block, full // self.block + 1), row[full:]

    def _pack(self, integers: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.view(torch.int8).copy_(integers)
        else:  # the first half of a block in the lower half of its bytes; 8 more, so that no integer is negative
            low, high = integers.chunk(2, dim=1)
            out.copy_(torch.add(low, high, alpha=16).add_(8 + 8 * 16))

    def _unpack(self, numbers: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.copy_(numbers.view(torch.int8))
        else:
            low, high = out.chunk(2, dim=1)
            low.copy_(numbers & 15)
            high.copy_(numbers >> 4)
            out.sub_(8)

    def _products(self, wire: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over stretches of `out` with their decoded values."""
        scales, numbers = self._split(wire, out.numel())
        exact = torch.float64 if out.dtype == torch.float64 else torch.float32
        scratch = torch.empty(self._most(out), dtype=exact, device=out.device)
        for blocks, at in self._stretches(out):
            products = scratch[: (blocks.stop - blocks.start) * self.block].view(-1, self.block)
            self._unpack(numbers[blocks], products)
            products.mul_(scales[blocks].to(exact).unsqueeze(1))
            yield at, products.view(-1)[: at.numel()]


def scales_of(largest: Tensor, bits: int) -> Tensor:
    """Return the scales, in bfloat16, of blocks with these largest absolute values.

    Rounded to the nearest: where that is down, the largest value is at most 127.25 (of 4 bits 7.02) scales, and 127 is nearest to
    it all the same."""
    scale = (largest / LARGEST[bits]).to(torch.bfloat16)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    return torch.where(scale.isfinite(), scale, float("nan"))

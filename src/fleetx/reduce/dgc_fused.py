"""Run DGC's arithmetic by Triton kernels: all float32 tensors on a GPU, in three launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from .dgc import Row, Rule, take_largest
from .dgc_triton import ROW_WORDS, WEIGHT_WORD, add, choose, gather

CHUNK, ADD_CHUNK, BLOCK = 2048, 1024, 2048
CANDIDATES = 8
"""Room for candidates, in multiples of the entries to send (and 1,024 more)."""
FIRST_SHARE = 0.9
"""The first bound of a tensor, as a share of the smallest entry sent before it."""


def fits(row: Row) -> bool:
    """Return whether the kernels can take this row: all of it is float32."""
    return {row.piece.grad.dtype, row.piece.param.dtype, row.v.dtype} == {torch.float32}


@final
class FusedRows:
    """Compress all float32 rows of one GPU."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self._device = rows[0].v.device
        self._bounds = torch.full((len(rows),), float("inf"), device=self._device)
        self._shares = torch.full((len(rows),), FIRST_SHARE, device=self._device)
        """Each tensor's next bound, as a share of the smallest entry sent last."""
        self._reached = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
        """Number of entries of each tensor that reached its bound."""
        self._done = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
        self._counts: list[int] = []
        self._rules: list[Rule] = []
        self._weights: list[Tensor] = []
        self._weights_at: list[int] = []
        chunks = [-(-len(row.v) // CHUNK) for row in rows]
        self._items = self._words([t << 32 | c for t, n in enumerate(chunks) for c in range(n)])

    def _words(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)

    def _lay_out(self, counts: Sequence[int]) -> None:
        """Write the table of addresses and sizes; repeated when the sparsity changes."""
        self._counts = list(counts)
        rooms = [min(CANDIDATES * count + 1024, len(row.v)) for row, count in zip(self._rows, counts, strict=True)]
        firsts, outs = (list(itertools.accumulate(sizes, initial=0)) for sizes in (rooms, counts))
        words = []
        for row, first, room, out, count in zip(self._rows, firsts, rooms, outs, counts, strict=False):
            rows = (row.piece.grad, row.u, row.v, row.v, row.piece.bucket.flat)
            words += [*(tensor.data_ptr() for tensor in rows), len(row.v), first, room, out, count]
        self._table = self._words(words)
        self._weights_at = []
        self._candidates = torch.zeros(firsts[-1], dtype=torch.int32, device=self._device)
        self._sizes = torch.zeros_like(self._candidates)
        pieces = [-(-count // ADD_CHUNK) for count in counts]
        self._add_items = self._words([t << 32 | c for t, n in enumerate(pieces) for c in range(n)])

    def _find_weights(self) -> None:
        """Update the addresses of the weights: `param.data = ...` or another memory format may have moved them."""
        self._weights = [row.piece.weights() for row in self._rows]
        places = [weights.data_ptr() for weights in self._weights]
        if places != self._weights_at:
            self._weights_at = places
            self._table.view(-1, ROW_WORDS)[:, WEIGHT_WORD] = self._words(places)

    def _send_rules(self, rules: Sequence[Rule]) -> None:
        """Copy the groups' settings to the device."""
        self._rules = list(rules)
        numbers = [(rule.momentum, rule.decay, float(rule.nesterov)) for rule in rules]
        self._rule_table = torch.tensor(numbers, dtype=torch.float32).to(self._device)

    def compress(self, rules: Sequence[Rule], counts: Sequence[int]) -> Tensor:
        """Return what this rank sends, as 32-bit words: first all values, then their places in their buckets."""
        if list(counts) != self._counts:
            self._lay_out(counts)
        if list(rules) != self._rules:
            self._send_rules(rules)
        entries = sum(counts)
        wire = torch.empty(2 * entries, dtype=torch.int32, device=self._device)
        values, places = wire[:entries].view(torch.float32), wire[entries:]
        decays = any(rule.decay for rule in rules)
        if decays:
            self._find_weights()
        gather[(len(self._items),)](
            self._items,
            self._table,
            self._rule_table,
            self._bounds,
            self._reached,
            self._candidates,
            CHUNK,
            decays,
            num_warps=4,
        )
        choose[(len(self._rows),)](
            self._table, self._bounds, self._shares, self._reached, self._candidates, self._sizes, values, places, self._done,
            BLOCK, num_warps=16,
        )  # fmt: skip
        self._reached.zero_()  # not in the kernel that reads it: a slow warp would read the 0
        done = self._done.tolist()
        if not all(done):
            self._choose_by_sorting([i for i, is_done in enumerate(done) if not is_done], values, places)
        return wire

    def _choose_by_sorting(self, left: Sequence[int], values: Tensor, places: Tensor) -> None:
        """Choose among all entries of the tensors in `left`, of which too few or too many reached the bound."""
        starts = list(itertools.accumulate(self._counts, initial=0))
        for i in left:
            row, at = self._rows[i], slice(starts[i], starts[i + 1])
            chosen, values[at] = take_largest(row.u, row.v, self._counts[i])
            places[at] = (chosen + row.piece.offset).int()
            self._bounds[i] = values[at].abs().min() * FIRST_SHARE
            self._shares[i] = FIRST_SHARE

    def spread(self, wires: Tensor, counts: Sequence[int]) -> None:
        """Add every rank's entries into the gradients, in the order of ranks."""
        torch._foreach_zero_([row.piece.grad for row in self._rows])
        for wire in wires:  # one launch after the other: the order of ranks gives all ranks the same bits
            add[(len(self._add_items),)](self._add_items, self._table, wire, sum(counts), ADD_CHUNK, num_warps=4)

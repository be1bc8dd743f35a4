"""One launch of a kernel over one set of tensors: sizes and order are fixed, addresses and settings may change every step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from .common import GROUP_NUMBERS, ROW_WORDS, SCALES
from .order import chunks_of, work_order
from .table import Table

COLUMN = {
    name: i for i, name in enumerate("param grad first second master step grad_norm numel first_chunk chunks decayed".split())
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measured on an H200 by bench/optimizer_step.py."""

    chunk_elements: int = 4096
    warps: int = 8
    registers: int | None = None
    """At most so many per thread; None: as the compiler likes."""
    lag: int = 264
    """Items between a tensor's last measurement and its first update."""
    keep: str = ""
    ticket: bool = True


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is fixed of the tensors of one launch."""

    numels: Sequence[int]
    adapted: Sequence[bool]
    decayed: Sequence[bool]
    groups: Sequence[int]


@final
class Plan:
    """Everything a launch needs but addresses and settings, on the device."""

    def __init__(self, tensors: Tensors, *, names: list[str | None], n_groups: int, device: torch.device, tuning: Tuning) -> None:
        self.tuning, self.device, self.names = tuning, device, names
        self.n_tensors = count = len(tensors.numels)
        self._chunks = [chunks_of(numel, tuning.chunk_elements) for numel in tensors.numels]
        self._adapted = tensors.adapted
        self._rows = np.zeros((count, ROW_WORDS), dtype=np.int64)
        self._rows[:, COLUMN["numel"]] = tensors.numels
        self._rows[:, COLUMN["chunks"]] = self._chunks
        self._rows[:, COLUMN["first_chunk"]] = np.cumsum([0, *self._chunks[:-1]])
        self._rows[:, COLUMN["decayed"]] = tensors.decayed
        self._groups = np.zeros((n_groups, GROUP_NUMBERS), dtype=np.float64)
        self.table = Table(self._rows.size + self._groups.size, device)
        padded = -(-count // 4) * 4  # so that each part begins where 128-bit accesses may
        self._counters = torch.zeros(4 + 2 * padded, dtype=torch.int32, device=device)
        self.queue, self.arrived, self.ready = self._counters.split([4, padded, padded])
        self.sums = [torch.zeros(sum(self._chunks), dtype=torch.float32, device=device) for _ in range(2)]
        self.scales = torch.zeros(count * SCALES, dtype=torch.float32, device=device)
        self._group_of = tensors.groups
        self._last_columns: Mapping[str, Sequence[int]] = {}
        self._last_settings: Sequence[Sequence[float]] = []
        self._words = np.zeros(0, dtype=np.int64)
        self._cut: tuple[Tensor, Tensor, Tensor] | None = None
        self._judged: list[int] = []
        self._is_aligned = False
        self._items: dict[bool, Tensor] = {}

    def items(self, *, measured: bool = False) -> Tensor:
        """All items in the order in which they are taken."""
        if measured not in self._items:
            order = work_order(self._chunks, self._adapted, lag=self.tuning.lag, measured=measured)
            words = torch.tensor([item.word(self._group_of[item.tensor]) for item in order], dtype=torch.int64)
            self._items[measured] = words.to(self.device)
        return self._items[measured]

    def send(self, columns: Mapping[str, Sequence[int]], settings: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
        """Rows and groups on the device."""
        if columns != self._last_columns or settings != self._last_settings:
            self._last_columns, self._last_settings = dict(columns), settings
            for name, addresses in columns.items():
                self._rows[:, COLUMN[name]] = addresses
            for number, values in enumerate(settings):
                self._groups[number, : len(values)] = values
            self._words = np.concatenate([self._rows.reshape(-1), self._groups.reshape(-1).view(np.int64)])
        table = self.table.send(self._words)
        if self._cut is None or self._cut[0] is not table:
            rows, groups = table.split([self._rows.size, self._groups.size])
            self._cut = table, rows, groups.view(torch.float64)
        return self._cut[1:]

    def is_aligned(self, addresses: list[int]) -> bool:
        """Whether 128-bit accesses are possible: gradients in a reducer's flat buffer begin anywhere."""
        if addresses != self._judged:
            self._judged, self._is_aligned = addresses, functools.reduce(operator.or_, addresses) % 16 == 0
        return self._is_aligned

    def reset(self) -> None:
        """Before each launch: the first ticket is next, and nobody has arrived."""
        self._counters.zero_()

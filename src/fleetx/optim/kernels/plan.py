"""One launch of a kernel over one set of tensors: sizes and order are fixed, addresses and settings may change every step."""

from __future__ import annotations

import functools
import itertools
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
    programs_per_processor: int = 2
    lag: int = 2
    """Items between a chunk's measurement and its update."""

    def registers(self, device: torch.device) -> int | None:
        """What a thread may use so that all programs run at once: they wait for each other."""
        if device.type != "cuda":
            return None
        of_processor: int = torch.cuda.get_device_properties(device).regs_per_multiprocessor
        return min(255, of_processor // (self.programs_per_processor * self.warps * 32) // 8 * 8)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is fixed of the tensors of one launch."""

    numels: Sequence[int]
    adapted: Sequence[bool]
    decayed: Sequence[bool]
    groups: Sequence[int]


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@final
class Plan:
    """Everything a launch needs but addresses and settings, on the device."""

    def __init__(self, tensors: Tensors, *, names: list[str | None], n_groups: int, device: torch.device, tuning: Tuning) -> None:
        self.tuning, self.device, self.names = tuning, device, names
        self.registers = tuning.registers(device)
        self.programs = processors(device) * tuning.programs_per_processor
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
        self._counters = torch.zeros(2 * padded, dtype=torch.int32, device=device)
        self.arrived, self.ready = self._counters.split(padded)
        self.sums = [torch.zeros(sum(self._chunks), dtype=torch.float32, device=device) for _ in range(2)]
        self.scales = torch.zeros(count * SCALES, dtype=torch.float32, device=device)
        self._group_of = tensors.groups
        self._last_columns: Mapping[str, Sequence[int]] = {}
        self._last_settings: Sequence[Sequence[float]] = []
        self._words = np.zeros(0, dtype=np.int64)
        self._cut: tuple[Tensor, Tensor, Tensor] | None = None
        self._judged: list[int] = []
        self._is_aligned = False
        self._items: dict[bool, tuple[Tensor, Tensor]] = {}

    def items(self, *, measured: bool = False) -> tuple[Tensor, Tensor]:
        """All programs' items one after the other, and where each program's begin."""
        if measured not in self._items:
            lists = work_order(self._chunks, self._adapted, programs=self.programs, lag=self.tuning.lag, measured=measured)
            words = [item.word(self._group_of[item.tensor]) for items in lists for item in items]
            begins = list(itertools.accumulate((len(items) for items in lists), initial=0))
            # One word more: a program looks at the next before it knows that there is none.
            listed = torch.tensor([*words, 0], dtype=torch.int64), torch.tensor(begins, dtype=torch.int32)
            self._items[measured] = listed[0].to(self.device), listed[1].to(self.device)
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
        """Before each launch: nobody has arrived."""
        self._counters.zero_()

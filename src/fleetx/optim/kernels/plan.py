"""One launch of a kernel over one set of tensors: sizes and order are fixed, addresses and settings may change every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from .common import GROUP_NUMBERS, ROW_WORDS, SCALES
from .order import Item, chunks_of, work_order
from .table import Table

COLUMN = {
    name: i
    for i, name in enumerate("param grad first second master step grad_norm numel first_chunk chunks group decayed".split())
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measured on an H200 by bench/optimizer_step.py."""

    chunk_elements: int = 4096
    warps: int = 8
    registers: int | None = None
    """At most so many per thread; None: as the compiler likes."""
    programs_per_processor: int = 2
    lag_per_program: float = 1.0


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

    def __init__(self, tensors: Tensors, *, n_groups: int, device: torch.device, tuning: Tuning) -> None:
        self.tuning, self.device = tuning, device
        self.programs = processors(device) * tuning.programs_per_processor
        self.n_tensors = count = len(tensors.numels)
        self._chunks = [chunks_of(numel, tuning.chunk_elements) for numel in tensors.numels]
        self._adapted = tensors.adapted
        self._rows = np.zeros((count, ROW_WORDS), dtype=np.int64)
        self._rows[:, COLUMN["numel"]] = tensors.numels
        self._rows[:, COLUMN["chunks"]] = self._chunks
        self._rows[:, COLUMN["first_chunk"]] = np.cumsum([0, *self._chunks[:-1]])
        self._rows[:, COLUMN["group"]] = tensors.groups
        self._rows[:, COLUMN["decayed"]] = tensors.decayed
        self._groups = np.zeros((n_groups, GROUP_NUMBERS), dtype=np.float64)
        self.table = Table(self._rows.size + self._groups.size, device)
        padded = -(-count // 4) * 4  # so that each part begins where 128-bit accesses may
        self._counters = torch.zeros(4 + 2 * padded, dtype=torch.int32, device=device)
        self.queue, self.arrived, self.ready = self._counters.split([4, padded, padded])
        self.sums = [torch.zeros(sum(self._chunks), dtype=torch.float32, device=device) for _ in range(2)]
        self.scales = torch.zeros(count * SCALES, dtype=torch.float32, device=device)
        self._items: dict[bool, Tensor] = {}

    def items(self, *, measured: bool = False) -> Tensor:
        if measured not in self._items:
            lag = round(self.programs * self.tuning.lag_per_program)
            order: list[Item] = work_order(self._chunks, self._adapted, lag=lag, measured=measured)
            words = torch.tensor([item.word() for item in order], dtype=torch.int64)
            self._items[measured] = words.to(self.device)
        return self._items[measured]

    def send(self, columns: Mapping[str, Sequence[int]], settings: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
        """Rows and groups on the device."""
        for name, addresses in columns.items():
            self._rows[:, COLUMN[name]] = addresses
        for number, values in enumerate(settings):
            self._groups[number, : len(values)] = values
        words = np.concatenate([self._rows.reshape(-1), self._groups.reshape(-1).view(np.int64)])
        rows, groups = self.table.send(words).split([self._rows.size, self._groups.size])
        return rows, groups.view(torch.float64)

    def reset(self) -> None:
        """Before each launch: the queue is full again, and nobody has arrived."""
        self._counters.zero_()

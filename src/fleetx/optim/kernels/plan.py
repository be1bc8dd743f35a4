"""Keep on the device what a step over one set of tensors needs: items and sums are fixed, addresses and settings may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from .common import GROUP_NUMBERS, ROW_WORDS, SCALES
from .order import Item, chunks_of, work_items

SPARES = 2
"""Page-locked buffers prepared for CUDA graphs, since none can be allocated during a capture."""


@final
class Table:
    """64-bit integers that tell the kernels where things are: written on the host in `words`, sent when they have changed.

    Nothing waits: the host writes page-locked memory that torch's allocator keeps until the copy is done. A CUDA graph replays
    its copies later, from the same memory, which is therefore the graph's alone and never written again.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self.words = np.zeros(count, dtype=np.int64)
        self._live = torch.zeros(count, dtype=torch.int64, device=device)
        self._spares: list[Tensor] = []
        self._of_graphs: list[Tensor] = []
        self._is_behind = False
        """Whether changes are missing on the device, having been sent to a graph's copy alone."""
        self.copies = 0
        """Copies to the device so far, outside graphs."""

    def on_device(self, *, changed: bool) -> Tensor:
        """Return the words on the device; `changed`: they were written since the last call."""
        if self._device.type != "cuda":
            return self._live.copy_(torch.from_numpy(self.words)) if changed else self._live
        self._is_behind |= changed
        if torch.cuda.is_current_stream_capturing():
            return self._in_graph()
        if self._is_behind:
            self._is_behind = False
            host = torch.empty(self._live.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            host.numpy()[:] = self.words
            self._live.copy_(host, non_blocking=True)
            self.copies += 1
        while len(self._spares) < SPARES:
            self._spares.append(torch.empty(self._live.shape, dtype=torch.int64, device="cpu", pin_memory=True))
        return self._live

    def _in_graph(self) -> Tensor:
        if not self._spares:
            raise ConfigError("capture one optimizer step per graph, and run one uncaptured step before each capture.")
        host = self._spares.pop()
        host.numpy()[:] = self.words
        self._of_graphs.append(host)
        return torch.empty_like(self._live).copy_(host, non_blocking=True)


COLUMN = {
    name: i for i, name in enumerate("param grad first second master step grad_norm numel first_chunk chunks decayed".split())
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch settings, measured on an H200 by bench/optimizer_step."""

    chunk_elements: int
    warps: int = 8


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one step: sizes, flags and the numbers of their groups."""

    numels: Sequence[int]
    adapted: Sequence[bool]
    decayed: Sequence[bool]
    groups: Sequence[int]


class Lists(NamedTuple):
    """Items on the device, each list for one launch."""

    measure: Tensor
    apply: Tensor
    at_once_and_measure: Tensor
    at_once_and_apply: Tensor


@final
class Plan:
    """What one set of tensors needs on the device, for all its steps."""

    def __init__(self, tensors: Tensors, *, names: list[str | None], n_groups: int, device: torch.device, tuning: Tuning) -> None:
        self.tensors, self.names, self.tuning, self.device = tensors, names, tuning, device
        self.n_tensors = count = len(tensors.numels)
        self._chunks = [chunks_of(numel, tuning.chunk_elements) for numel in tensors.numels]
        self.table = Table(count * ROW_WORDS + n_groups * GROUP_NUMBERS, device)
        self._rows = self.table.words[: count * ROW_WORDS].reshape(count, ROW_WORDS)
        self._groups = self.table.words[count * ROW_WORDS :].view(np.float64).reshape(n_groups, GROUP_NUMBERS)
        self._rows[:, COLUMN["numel"]] = tensors.numels
        self._rows[:, COLUMN["chunks"]] = self._chunks
        self._rows[:, COLUMN["first_chunk"]] = np.cumsum([0, *self._chunks[:-1]])
        self._rows[:, COLUMN["decayed"]] = tensors.decayed
        self._sent: dict[str, Any] = {}
        """Columns and settings as last written to the table."""
        self.sums = [torch.zeros(sum(self._chunks), dtype=torch.float32, device=device) for _ in range(2)]
        self.scales = torch.zeros(count * SCALES, dtype=torch.float32, device=device)
        self.nothing_found = torch.zeros((), dtype=torch.float32, device=device)
        """What the kernels read where no caller has said whether the gradients are finite."""
        words = [group << 32 | tensor for tensor, group in enumerate(tensors.groups)]
        adapted = [word for word, is_adapted in zip(words, tensors.adapted, strict=True) if is_adapted]
        self.all_tensors, self.adapted = self._on_device(words), self._on_device(adapted)
        """Tensors with their groups, for the launches that compute ratios."""
        self._lists: dict[bool, Lists] = {}
        self.is_aligned = False
        """Whether all gradients allow 128-bit accesses; in a reducer's flat buffer they may begin at any address."""
        self.compiled: dict[tuple[Any, ...], Any] = {}
        """Compiled kernels by their constants. Asking Triton each time costs as much host time as a small model's step."""

    def _on_device(self, words: list[int]) -> Tensor:
        return torch.tensor(words, dtype=torch.int64).to(self.device)

    def lists(self, *, measured: bool = False) -> Lists:
        if measured not in self._lists:
            work = work_items(self._chunks, self.tensors.adapted, self.tensors.groups, measured=measured)
            at_once, measure, apply = (self._on_device([Item.word(item) for item in items]) for items in work)
            self._lists[measured] = Lists(measure, apply, torch.cat([at_once, measure]), torch.cat([at_once, apply]))
        return self._lists[measured]

    def send(self, columns: Mapping[str, list[int]], settings: list[list[float]]) -> Tensor:
        """Write columns and settings, and return the table on the device: rows, and below them groups."""
        changed = False
        for name, addresses in columns.items():
            if addresses != self._sent.get(name):
                self._rows[:, COLUMN[name]] = self._sent[name] = addresses
                changed = True
                if name == "grad":
                    self.is_aligned = not np.any(self._rows[:, COLUMN["grad"]] % 16)
        if settings != self._sent.get("settings"):
            self._groups[:, : len(settings[0])] = self._sent["settings"] = settings
            changed = True
        return self.table.on_device(changed=changed)

    def place_of_lr(self, group: int) -> int:
        """Return the place of a group's learning rate in the table."""
        return self._rows.size + group * GROUP_NUMBERS

"""Check what the user asks of `auto`, and fill in the gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from ..dist.agree import ranks_where
from ..engine.slots import Risk
from ..errors import ConfigError
from ..strategies.auto import Auto
from . import candidate
from .candidate import allows, batches_of
from .subject import Subject

START_ROWS = 32
"""Rows that are measured first where a function makes the batches."""


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """Hold what the user asks for, with the gaps filled in."""

    auto: Auto
    memory: int | None
    share: int | None
    """Rows of one rank in one update; None: as in the sample."""
    merge_steps: int | None = None
    """Micro-batches of one update, as the user has set them; None: free to choose."""

    def batches(self, rows: int) -> list[tuple[int, int]]:
        """List micro-batches, and how many of them make one update, for a sample of so many rows."""
        if self.merge_steps is not None:
            return [(rows if self.share is None else self.share // self.merge_steps, self.merge_steps)]
        if self.share is not None:
            return batches_of(self.share, near=rows)
        return [(rows, steps) for steps in (candidate.MERGES if allows(self.auto.risk, Risk.SCHEDULE) else (1,))]


def require_sample(subject: Subject) -> None:
    without = ranks_where(subject.comm, subject.sample is None)
    if without:
        given = "given no batch" if len(without) == subject.comm.size else f"given no batch on ranks {without}"
        raise ConfigError(
            f"strategy.auto chooses by running steps, and fleet.distribute(...) was {given}. Write model, optimizer = "
            "fleet.distribute(model, optimizer, strategy, sample=batch), with loss_fn=lambda model, batch: ... where the model "
            f"has no method loss(batch).{_older_spelling(subject)}"
        )


def _older_spelling(subject: Subject) -> str:
    """Name the older spelling: `localsgd` and `auto` alone mean something else, which the user may have in mind."""
    if "localsgd" not in subject.fixed.names:
        return ""
    return " For a period that adapts itself, write strategy.adaptive_localsgd = True without auto."


def asked_for(subject: Subject, auto: Auto) -> Asked:
    ranks = subject.comm.size
    if callable(subject.sample) and auto.global_batch is None:
        raise ConfigError(
            "sample is a function, which makes a batch of so many rows; how many an update is to have is not said. Write "
            'strategy.auto_configs = {"global_batch": ...}, or give a batch.'
        )
    subject.start_with(max(2, min(START_ROWS, (auto.global_batch or 0) // ranks)))
    share = None
    if auto.global_batch is not None:
        if auto.global_batch % ranks:
            near = auto.global_batch - auto.global_batch % ranks or ranks
            raise ConfigError(
                f'auto_configs["global_batch"] is {auto.global_batch}, which {ranks} ranks cannot share equally. Write {near}.'
            )
        if subject.rows < 2:
            raise ConfigError(
                f'auto_configs["global_batch"] is {auto.global_batch}: micro-batches of other sizes are made of the rows of the '
                f"sample, and its tensors have {sorted(set(subject.rows_of_ranks))} of them on the ranks (0: not as many each). "
                "Give every rank a batch of at least 2 rows, or a function of the number of rows: sample=lambda rows: ..."
            )
        share = auto.global_batch // ranks
        _require_whole_micro_batches(share, subject.fixed.merge_steps or 1, auto.global_batch, ranks)
    limits = [limit for limit in (auto.memory, _own_budget(subject, auto), _memory_here(subject)) if limit is not None]
    return Asked(auto, min(limits, default=None), share, subject.fixed.merge_steps)


def _require_whole_micro_batches(share: int, merge_steps: int, global_batch: int, ranks: int) -> None:
    if share % merge_steps:
        near = max(1, share // merge_steps) * merge_steps * ranks
        raise ConfigError(
            f'auto_configs["global_batch"] is {global_batch}: the {share} rows of each rank cannot be made up of {merge_steps} '
            f'equal micro-batches, as gradient_merge_configs["k_steps"], which you set, wants them. Write {near}.'
        )


def _own_budget(subject: Subject, auto: Auto) -> int | None:
    """Return the budget of the user's own recompute, which leads to the same plans as a limit for all."""
    recompute = subject.fixed.recompute
    budget = None if recompute is None else recompute.budget
    if budget is not None and auto.memory is not None and budget > auto.memory:
        raise ConfigError(
            f'recompute_configs["budget"], which you set, is {budget}, and auto_configs["memory"] is {auto.memory}, less. '
            f"Write a budget of at most {auto.memory}."
        )
    return budget


def _memory_here(subject: Subject) -> int | None:
    """Return the memory that a device has for its process, the least of all ranks; None on CPUs. Ranks on one GPU share it."""
    mine: tuple[str, int, int] | None = None
    if subject.device.type == "cuda":
        subject.comm.all_reduce(torch.zeros(1, device=subject.device)).wait()  # the buffers of collectives are there then
        torch.cuda.synchronize(subject.device)
        free, _ = torch.cuda.mem_get_info(subject.device)
        card = str(torch.cuda.get_device_properties(subject.device).uuid)
        mine = (card, free, torch.cuda.memory_reserved(subject.device))
    found = [one for one in subject.comm.gather_json(mine) if one is not None]
    return least_share(found) if found else None


def least_share(ranks: Sequence[tuple[str, int, int]]) -> int:
    """Return the least memory of a rank. Each rank gives its GPU, the bytes free there, and those it holds and may use again."""
    sharing = Counter(card for card, _, _ in ranks)
    return min(free // sharing[card] + reserved for card, free, reserved in ranks)

"""Two-level communication: groups of ranks inside a node, where links are fast, and groups between nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from ..errors import ConfigError
from .comm import Comm, Pending


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Two groups that hold this rank: the ranks of its node, and the ranks with the same position on every node."""

    inside: Comm
    across: Comm


def two_level(comm: Comm, node_of_rank: Sequence[int] | None = None) -> TwoLevel:
    """Split all ranks by node, as given or by host name and the launcher's node number, into groups inside and across nodes."""
    own = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    nodes: list[Any] = list(node_of_rank) if node_of_rank is not None else comm.gather_json(own)
    by_node = [[r for r in range(comm.size) if nodes[r] == node] for node in dict.fromkeys(nodes)]
    widths = {len(members) for members in by_node}
    if len(widths) > 1:
        raise ConfigError(
            f"two levels need equally many ranks on every node; the nodes have {[len(members) for members in by_node]} ranks, "
            f"beginning with ranks {[members[0] for members in by_node]}. Start equally many on each, or use no two levels."
        )
    across = [list(peers) for peers in zip(*by_node, strict=True)]
    return TwoLevel(inside=comm.subgroup(by_node), across=comm.subgroup(across))


@final
class BetweenNodes(Comm):
    """A group with one rank per node: the first rank of each node communicates, then broadcasts the result inside its node.

    All ranks of a node must call the same collectives with equal tensors."""

    def __init__(self, levels: TwoLevel) -> None:
        self._inside, self._across = levels.inside, levels.across
        self.rank, self.size = levels.across.rank, levels.across.size
        self.control_device = levels.inside.control_device

    def _count(self) -> None:
        self.bytes_sent += self._inside.bytes_sent + self._across.bytes_sent
        self._inside.bytes_sent = self._across.bytes_sent = 0.0

    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        # The node's other ranks go straight to the broadcast and wait there.
        if self._inside.rank == 0:
            self._across.all_reduce(tensor, mode).wait()
        pending = self._inside.broadcast(tensor)
        self._count()
        return pending

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        if self._inside.rank == 0:
            gathered, pending = self._across.all_gather(tensor)
            pending.wait()
        else:
            gathered = tensor.new_empty((self.size, *tensor.shape))
        pending = self._inside.broadcast(gathered)
        self._count()
        return gathered, pending

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        if self._inside.rank == 0:
            self._across.broadcast(tensor, source).wait()
        pending = self._inside.broadcast(tensor)
        self._count()
        return pending

    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        raise ConfigError("a group of nodes cannot be split further; make subgroups of ranks.")


def between_nodes(comm: Comm) -> TwoLevel:
    """Return two levels: `inside`, the ranks of this node; `across`, the nodes with one rank each."""
    levels = two_level(comm)
    return TwoLevel(inside=levels.inside, across=BetweenNodes(levels))

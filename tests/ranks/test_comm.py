"""Collectives on real gloo ranks, and what they count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleetx import fleet
from fleetx.dist import world
from fleetx.dist.nodes import two_level
from tests.helpers.harness import raised, run_ranks


def _bytes(rank: int) -> dict[str, float]:
    comm = world.current().comm
    counted = {}
    for name, call in {
        "all_reduce": lambda: comm.all_reduce(torch.ones(300)).wait(),
        "all_gather": lambda: comm.all_gather(torch.ones(300))[1].wait(),
        "half": lambda: comm.all_reduce(torch.ones(300, dtype=torch.bfloat16)).wait(),
    }.items():
        before = comm.bytes_sent
        call()
        counted[name] = comm.bytes_sent - before
    return counted


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_follow_the_ring_formulas(size: int) -> None:
    for counted in run_ranks(_bytes, size):
        assert counted["all_reduce"] == pytest.approx(2 * (size - 1) / size * 1200)
        assert counted["half"] == pytest.approx(2 * (size - 1) / size * 600)
        assert counted["all_gather"] == (size - 1) * 1200


def _util(rank: int) -> dict[str, Any]:
    reduced = fleet.util.all_reduce({"loss": 0.5 + rank, "count": rank + 1, "array": np.array([rank, 2.0])})
    return {
        "dict": {k: (type(v).__name__, np.asarray(v).tolist()) for k, v in reduced.items()},
        "tensor": fleet.util.all_reduce(torch.tensor([rank, 5]), "max").tolist(),
        "min": fleet.util.all_reduce(2**60 + rank, "min"),
        "mean": fleet.util.all_reduce(rank, "mean"),
        "gather": fleet.util.all_gather({"rank": rank, "text": "x" * rank}),
        "arrays": [a.tolist() for a in fleet.util.all_gather(np.array([rank]))],
        "shard": fleet.util.get_file_shard(["a", "b", "c", "d", "e"]),
        "roles": (
            fleet.worker_index(),
            fleet.worker_num(),
            fleet.is_first_worker(),
            fleet.node_num(),
            len(fleet.worker_endpoints()),
        ),
    }


def test_util_gives_back_the_kind_it_was_given() -> None:
    first, second = run_ranks(_util, 2)
    assert first["dict"] == {"loss": ("float", 2.0), "count": ("int", 3), "array": ("ndarray", [1.0, 4.0])}
    assert first["tensor"] == [1, 5] and first["min"] == 2**60 and first["mean"] == 0.5
    assert second["gather"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}] and second["arrays"] == [[0], [1]]
    assert (first["shard"], second["shard"]) == (["a", "b", "c"], ["d", "e"])
    assert first["roles"] == (0, 2, True, 1, 2) and second["roles"] == (1, 2, False, 1, 2)


def _disagree(rank: int) -> list[str]:
    return [
        raised(lambda: fleet.util.all_reduce(torch.ones(2 + rank))),
        raised(lambda: fleet.util.all_reduce({"a" if rank else "b": 1})),
        raised(lambda: fleet.util.all_reduce("text")),
        raised(lambda: fleet.util.all_reduce(1, "product")),
    ]


def test_ranks_that_disagree_are_told_so_on_every_rank() -> None:
    for messages in run_ranks(_disagree, 2):
        assert "ranks do not agree" in messages[0] and "[2]" in messages[0] and "[3]" in messages[0]
        assert "ranks do not agree" in messages[1]
        assert "all_reduce was given str" in messages[2] and "mode is 'product'" in messages[3]


def _levels(rank: int) -> dict[str, Any]:
    levels = two_level(world.current().comm, node_of_rank=[0, 0, 1, 1])
    inside, across = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    levels.inside.all_reduce(inside).wait()
    levels.across.all_reduce(across).wait()
    return {
        "inside": inside.item(),
        "across": across.item(),
        "sizes": (levels.inside.size, levels.across.size),
        "ragged": raised(lambda: two_level(world.current().comm, node_of_rank=[0, 0, 0, 1])),
    }


def test_two_levels_sum_inside_a_node_and_across_nodes() -> None:
    ranks = run_ranks(_levels, 4)
    assert [r["inside"] for r in ranks] == [1.0, 1.0, 5.0, 5.0]
    assert [r["across"] for r in ranks] == [2.0, 4.0, 2.0, 4.0]
    assert all(r["sizes"] == (2, 2) and "equally many ranks" in r["ragged"] for r in ranks)

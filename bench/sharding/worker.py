"""One rank of bench/sharding: plain training, ours sharded and torch's ZeroRedundancyOptimizer in turns; or stage 3 and FSDP2."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from bench.lib.mlp import Contestant, Size, data, mlp, sent_by_all_reduce
from bench.lib.results import publish
from bench.lib.turns import Block, in_turns, warm
from fleetx import fleet

DENSE, SHARDED, ZERO = "dense (ours)", "sharding (ours)", "torch DDP + ZeroRedundancyOptimizer"
WEIGHTS, FSDP = "sharding, stage 3 (ours)", "torch fully_shard"
LR, BLOCK_STEPS, WARM_STEPS = 1e-4, 4, 3
GOALS = {"bytes_of_dense": 1.01, "of_dense": 1.03}
"""Of sharding, at most."""


@dataclass(frozen=True)
class Row:
    contestant: Contestant
    state: Callable[[], dict[Any, dict[str, Any]]]
    """Returns what its optimizer keeps on this rank."""


def ours(name: str, strategy: dict[str, Any], size: Size) -> Row:
    with contextlib.redirect_stdout(io.StringIO()):  # the overview of each strategy
        model: nn.Module = mlp(size)
        chosen = fleet.DistributedStrategy(**strategy)
        model, optimizer = fleet.distribute(model, AdamW(model.parameters(), lr=LR), chosen)
    x, y = data(size)

    def step() -> int:
        return int(optimizer.minimize(nn.functional.mse_loss(model(x), y)).bytes_sent)

    return Row(Contestant(name, step, BLOCK_STEPS, 1, 0, WARM_STEPS), lambda: optimizer.state)


def torch_zero(size: Size) -> Row:
    """Gradients are all-reduced, and then each parameter is broadcast by the rank that owns it: half as many bytes again."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # not by who reads the names alone: it warns of torch.jit

    model = DistributedDataParallel(mlp(size))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, lr=LR)
    x, y = data(size)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    sent = sent_by_all_reduce(size.weights + size.biases, 4) * 3 // 2
    return Row(Contestant(ZERO, step, BLOCK_STEPS, 1, sent, WARM_STEPS), lambda: optimizer.optim.state)


def torch_fsdp(size: Size) -> Row:
    """Each layer's weights are gathered for its forward and its backward, and its gradients reduced: three shares of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = mlp(size)
    mesh = init_device_mesh("cpu", (fleet.worker_num(),))
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=LR)
    x, y = data(size)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    sent = sent_by_all_reduce(size.weights + size.biases, 4) * 3 // 2
    return Row(Contestant(FSDP, step, BLOCK_STEPS, 1, sent, WARM_STEPS), lambda: optimizer.state)


def state_bytes(row: Row) -> list[int]:
    """Return the bytes of the optimizer's tensors, rank by rank."""
    kept = (value for state in row.state().values() for value in state.values() if isinstance(value, Tensor))
    held = sum(value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes for value in kept)
    return [int(one) for one in fleet.util.all_gather(held)]


def figures(row: Row, blocks: Sequence[Block], dense: Sequence[Block]) -> dict[str, Any]:
    one = row.contestant
    ratios = sorted(block.seconds / other.seconds for block, other in zip(blocks, dense, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios
    counted = [sent for block in blocks for sent in block.counted_bytes]
    return {
        "step_ms": round(statistics.median(block.seconds for block in blocks) * 1e3, 2),
        "of_dense": round(statistics.median(ratios), 3),
        "of_dense_quartiles": [round(q, 3) for q in quartiles],
        "bytes_per_step": round(statistics.mean(counted)) if counted else one.wire_bytes,
    }


def measure(rounds: int, size: Size, *, weights: bool) -> dict[str, dict[str, Any]]:
    """Measure all rows against the first."""
    if weights:
        rows = [torch_fsdp(size), ours(WEIGHTS, {"sharding": {"stage": 3}}, size)]
    else:
        rows = [ours(DENSE, {}, size), ours(SHARDED, {"sharding": True}, size), torch_zero(size)]
    first = rows[0].contestant.name
    contestants = [row.contestant for row in rows]
    warm(contestants)
    blocks = in_turns(contestants, rounds)
    found = {}
    for row in rows:
        name = row.contestant.name
        found[name] = figures(row, blocks[name], blocks[first]) | {"state_bytes": state_bytes(row)}
    for one in found.values():
        one["bytes_of_dense"] = round(one["bytes_per_step"] / found[first]["bytes_per_step"], 4)
    return {name: _of_fsdp(one) for name, one in found.items()} if weights else found


def _of_fsdp(figures: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("of_dense", "of_fsdp"): value for name, value in figures.items()}


def work(plan: dict[str, Any]) -> None:
    """Measure on this rank; the first one publishes, or prints where no name is given."""
    torch.set_num_threads(1)
    fleet.init()
    size = Size(**plan["size"])
    rows = measure(plan["rounds"], size, weights=plan["weights"])
    if not fleet.is_first_worker():
        return
    if plan["name"] is None:
        print(json.dumps(rows), flush=True)
        return
    verdicts = (
        {}
        if plan["weights"]
        else {key: {"goal": goal, "value": rows[SHARDED][key], "met": rows[SHARDED][key] <= goal} for key, goal in GOALS.items()}
    )
    common = {"numel": size.weights + size.biases, "batch": size.batch, "ranks": fleet.worker_num(), "rounds": plan["rounds"]}
    publish(plan["name"], {**common, "rows": rows, "verdicts": verdicts})

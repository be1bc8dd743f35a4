"""The small runs that tests of the compressors share: one problem, trained by the engine on real ranks, or by hand beside it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.compression_reference import Array, DGCWorkers, Rule, Tensors
from tests.helpers.localsgd_reference import net_gradient, unflatten
from tests.helpers.localsgd_runs import flat, loss_of, net, rows_of, weight_of

LR = 0.1
EXACT = 1e-12
"""For float64: sums may be taken in another order, nothing else."""
PLACES = ("0.weight", "0.bias", "2.weight", "2.bias")
"""The net's tensors, in the order of its parameters: 12, 4, 8 and 2 numbers."""


def dgc(**configs: Any) -> dict[str, Any]:
    return {"dgc": True, "dgc_configs": {"min_numel": 1, **configs}}


def powersgd(**configs: Any) -> dict[str, Any]:
    return {"powersgd": True, "powersgd_configs": {"begin_step": 0, "min_compression": 0.001, **configs}}


def quantised(**configs: Any) -> dict[str, Any]:
    return {"quantized_allreduce": True, "quantized_allreduce_configs": {"block": 16, **configs}}


def merged(k: int) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k}}


FP16 = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 4}
AMP = {"amp": True, "amp_configs": FP16}


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: dict[str, Any]) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
        return fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of whatever a stage or an optimizer keeps, copied."""
    if isinstance(tree, dict):
        return {path: leaf for key, value in tree.items() for path, leaf in leaves(value, f"{name}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {path: leaf for key, value in enumerate(tree) for path, leaf in leaves(value, f"{name}/{key}").items()}
    return {name: tree.detach().clone() if isinstance(tree, Tensor) else tree}


def kept(optimizer: Any) -> dict[str, Any]:
    return leaves(optimizer.pipeline.stages.reduce.state_dict())


def unequal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Keys under which the two differ, to the bit."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    return [key for key in ours | theirs if key not in ours or key not in theirs or not same(ours[key], theirs[key])]


def share_rows(optimizer: Any, what: str, names: tuple[str, ...], numels: list[int]) -> Array:
    """What a rank keeps, tensor by tensor in one row; zeros for those of which it keeps nothing."""
    named = optimizer.pipeline.stages.reduce.state_dict()["shares"][what]
    rows = [
        named[name].detach().reshape(-1).numpy().copy() if name in named else np.zeros(n)
        for name, n in zip(names, numels, strict=True)
    ]
    return np.concatenate(rows)


# --- the net whose gradient is derived by hand --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: what the strategy says, and how the loop goes."""

    strategy: dict[str, Any]
    updates: int = 20
    momentum: float = 0.9
    nesterov: bool = False
    decay: float = 0.0
    merged: int = 1
    weighted: bool = False
    lrs: dict[int, float] = field(default_factory=dict)
    """The learning rate from an update on."""
    momenta: dict[int, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


@dataclass
class Trace:
    """What one rank saw, after each update."""

    weights: list[Array] = field(default_factory=list)
    unsent: list[Array] = field(default_factory=list)
    momenta: list[Array] = field(default_factory=list)
    densities: list[float | None] = field(default_factory=list)
    residuals: list[float | None] = field(default_factory=list)


def in_force(changes: dict[int, float], update: int, default: float) -> float:
    return next((changes[start] for start in sorted(changes, reverse=True) if update >= start), default)


def train(rank: int, case: Case) -> Trace:
    """The engine, through public names; what is kept is looked at in the stage's state."""
    model = net(case.dtype)
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=case.momentum, nesterov=case.nesterov, weight_decay=case.decay)
    strategy = case.strategy | (merged(case.merged) if case.merged > 1 else {})
    model, ours = distributed(model, inner, strategy)
    numels, trace = [p.numel() for p in model.parameters()], Trace()
    for update in range(1, case.updates + 1):
        ours.param_groups[0]["lr"] = in_force(case.lrs, update, LR)
        ours.param_groups[0]["momentum"] = in_force(case.momenta, update, case.momentum)
        for micro in range(case.merged):
            weight = weight_of(rank, update, micro) if case.weighted else None
            report = ours.minimize(loss_of(model, rank, update, micro), weight=weight)
        trace.weights.append(flat(model))
        trace.densities.append(report.density)
        trace.residuals.append(report.residual_norm)
        if "dgc" in strategy:
            trace.unsent.append(share_rows(ours, "unsent", PLACES, numels))
            trace.momenta.append(share_rows(ours, "momentum", PLACES, numels))
    return trace


def shares_of(case: Case, p: Tensors, update: int, *, ranks: int) -> list[Tensors]:
    """Each rank's share of the mean gradient at these weights, by hand."""
    row = np.concatenate(p)
    weights = [[weight_of(r, update, micro) if case.weighted else 1.0 for micro in range(case.merged)] for r in range(ranks)]
    total = float(np.sum(weights))
    sums = [
        sum(w * net_gradient(row, *rows_of(rank, update, micro))[1] for micro, w in enumerate(weights[rank]))
        for rank in range(ranks)
    ]
    return [[piece.ravel() / total for piece in unflatten(np.asarray(g))] for g in sums]


def expected(case: Case, rule: Rule, *, ranks: int, nodes: tuple[int, ...] | None = None) -> DGCWorkers:
    """The reference on the same problem; with `nodes`, each of them is one worker, whose share is the sum of its ranks'."""
    start = [piece.ravel() for piece in unflatten(flat(net()))]
    workers = DGCWorkers(start, ranks if nodes is None else len(set(nodes)), rule)
    for update in range(1, case.updates + 1):
        shares = shares_of(case, workers.p, update, ranks=ranks)
        if nodes is not None:
            shares = summed_by_node(shares, nodes)
        lr, momentum = in_force(case.lrs, update, LR), in_force(case.momenta, update, case.momentum)
        workers.step(update, shares, lr=lr, momentum=momentum)
    return workers


def summed_by_node(shares: list[Tensors], nodes: tuple[int, ...]) -> list[Tensors]:
    of_node = [[share for share, at in zip(shares, nodes, strict=True) if at == node] for node in sorted(set(nodes))]
    return [[np.asarray(sum(rows)) for rows in zip(*group, strict=True)] for group in of_node]


def assert_equals_reference(traces: list[Trace], wanted: DGCWorkers, atol: float = EXACT, worker_of: Any = None) -> None:
    total = sum(row.size for row in wanted.p)
    for rank, trace in enumerate(traces):
        worker = rank if worker_of is None else worker_of[rank]
        for update, ours in enumerate(trace.weights, start=1):
            said = f"rank {rank}, update {update}"
            at = update - 1
            np.testing.assert_array_equal(ours, traces[0].weights[at], err_msg=said)
            np.testing.assert_allclose(ours, wanted.weights[at], rtol=0, atol=atol, err_msg=said)
            np.testing.assert_allclose(trace.unsent[at], wanted.unsent[at][worker], rtol=0, atol=atol, err_msg=said)
            residual = np.linalg.norm(wanted.unsent[at][worker])
            np.testing.assert_allclose(trace.residuals[at], residual, rtol=0, atol=atol, err_msg=said)
            assert trace.densities[at] == wanted.sent[at] / total, said
        if wanted.begun:
            np.testing.assert_allclose(trace.momenta[-1], wanted.momenta[-1][worker], rtol=0, atol=atol)


# --- gradients at will --------------------------------------------------------------------------------------------------


class Slopes(nn.Module):
    """A loss that is linear in the weights: its gradient is exactly the slopes it is given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, slopes: list[Array]) -> Tensor:
        terms = [
            (p * torch.from_numpy(slope).to(p.dtype).view(p.shape)).sum() for p, slope in zip(self.rows, slopes, strict=True)
        ]
        # Equal losses on all ranks would be taken for equal data, of which a warning tells.
        return torch.stack([term.double() for term in terms]).sum() + fleet.worker_index()


def heavy_tailed(shapes: list[tuple[int, ...]], rank: int, update: int) -> list[Array]:
    """Few large entries, as gradients have; float32."""
    random = np.random.default_rng((update, rank))
    return [(random.normal(size=shape) ** 3).astype(np.float32) for shape in shapes]

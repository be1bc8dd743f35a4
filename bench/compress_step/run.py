"""What DGC's arithmetic costs on a GPU: ResNet-50's gradients compressed, and two ranks' entries put back.

    python -m bench.compress_step.run            on a GPU, under a minute
    python -m bench.compress_step.run --smoke    on any machine, small; nothing is kept

    kernels        ours on a GPU: three launches for all tensors
    list           ours where there are no kernels: each tensor's k largest by keys of 64 bits
    torch.topk     accumulate, torch.topk of the sizes of each tensor, mask, add: of equal entries it takes any
    copy           a large copy, whose bandwidth gives the floor: 20 bytes a parameter (g, u, v read, u, v written)

Between steps new gradients are put in place (`refill`, a row of its own): in `wall_ms`, and not in `single_ms`, which is one step
on an idle device until it is done. Before anything is timed, the kernels' choice is checked against a stable sort, on many
updates: that of all entries, and with ties. The words of the columns: bench/lib/step_clock.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.lib.results import publish, surroundings
from bench.lib.step_clock import Contestant, compete, launches, synchronisations, warm_up
from fleetx.applications import Resnet50
from fleetx.engine.bucket import Bucket
from fleetx.engine.layout import bucket_runs
from fleetx.reduce.compressor import pieces_of
from fleetx.reduce.dgc import ListedRows, Row, Rule, accumulate, entries_sent
from fleetx.reduce.top_k import largest_by_sorting

SPARSITY, MIN_NUMEL, RANKS = 0.999, 16384, 2
RULE = Rule(momentum=0.9, nesterov=False, decay=0.0)
LIMIT_MS = 0.6
FLOOR_BYTES = 20
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
SETS, CHECKED_UPDATES = 4, 24
SECONDS, ROUNDS, BLOCK_SECONDS = 25.0, 25, 0.1


class Problem:
    """A model's gradients in buckets, and what DGC keeps of them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = [(name, nn.Parameter(p.detach().to(device))) for name, p in model.named_parameters()]
        runs = bucket_runs(named[::-1], bucket_bytes=32 * 2**20)
        self.buckets = [Bucket(i, run, tail_numel=0) for i, run in enumerate(runs)]
        pieces = [piece for bucket in self.buckets for piece in pieces_of(bucket) if piece.param.numel() >= MIN_NUMEL]
        self.rows = [Row(piece, torch.zeros_like(piece.grad), torch.zeros_like(piece.grad)) for piece in pieces]
        self.numel = sum(bucket.flat.numel() for bucket in self.buckets)
        self.counts = [entries_sent(len(row.v), SPARSITY) for row in self.rows]
        self.sets = [[self._drawn(bucket, seed) for bucket in self.buckets] for seed in range(SETS)]
        self._next = 0

    def _drawn(self, bucket: Bucket, seed: int) -> Tensor:
        """Noise whose scale differs from tensor to tensor and from entry to entry, as that of gradients does."""
        random = torch.Generator(bucket.flat.device).manual_seed(seed)
        places = torch.Generator(bucket.flat.device).manual_seed(1000 + bucket.index)
        scale = torch.empty_like(bucket.flat).normal_(generator=places).exp_()
        return torch.empty_like(bucket.flat).normal_(generator=random).mul_(scale)

    def refill(self) -> None:
        self._next = (self._next + 1) % SETS
        torch._foreach_copy_([bucket.flat for bucket in self.buckets], self.sets[self._next])


def step_of(way: Any, problem: Problem) -> Callable[[], None]:
    def step() -> None:
        wire = way.compress([RULE] * len(problem.rows), problem.counts)
        way.spread(wire.expand(RANKS, -1), problem.counts)

    return step


def topk_step(problem: Problem) -> Callable[[], None]:
    """As it is usually written."""

    def step() -> None:
        sent = []
        for row, count in zip(problem.rows, problem.counts, strict=True):
            accumulate(row.piece.grad, row.u, row.v, None, RULE)
            places = torch.topk(row.v.abs(), count, sorted=False).indices
            sent.append((places, row.v[places]))
            row.v[places] = 0.0
            row.u[places] = 0.0
        for row, (places, values) in zip(problem.rows, sent, strict=True):
            row.piece.grad.zero_()
            for _ in range(RANKS):
                row.piece.grad.index_add_(0, places, values)

    return step


def check_choice(way: Any, problem: Problem, *, updates: int) -> dict[str, int]:
    """Exactly the k largest, of equal ones the first; all others kept. Raises where not. How often all had to be looked at."""
    looked_at_all = 0
    for update in range(updates):
        problem.refill()
        if update % 3 == 2:  # few different sizes: many ties
            for bucket in problem.buckets:
                bucket.flat.mul_(4).round_()
            for row in problem.rows:
                row.u.round_()
                row.v.round_()
        rule = RULE if update % 3 != 2 else Rule(momentum=1.0, nesterov=False, decay=0.0)
        wire = way.compress([rule] * len(problem.rows), problem.counts)
        entries = sum(problem.counts)
        values, places = wire[:entries].view(torch.float32), wire[entries:].long()
        looked_at_all += len(problem.rows) - sum(getattr(way, "_done", torch.ones(len(problem.rows))).tolist())
        start = 0
        for row, count in zip(problem.rows, problem.counts, strict=True):
            mine = places[start : start + count] - row.piece.offset
            before = row.v.clone()
            before[mine] = values[start : start + count]
            wanted = largest_by_sorting(before, count)
            if not torch.equal(mine.sort().values, wanted) or bool(row.v[mine].any()) or bool(row.u[mine].any()):
                raise SystemExit(f"update {update}: {row.piece.name} sent other entries than its {count} largest")
            start += count
        way.spread(wire.expand(RANKS, -1), problem.counts)
        for bucket in problem.buckets:
            expected = torch.zeros_like(bucket.flat)
            own = [row for row in problem.rows if row.piece.bucket is bucket]
            mask = torch.zeros_like(bucket.flat, dtype=torch.bool)
            for row in own:
                mask[row.piece.offset : row.piece.offset + len(row.v)] = True
            first = sum(c for row, c in zip(problem.rows, problem.counts, strict=True) if row.piece.bucket.index < bucket.index)
            count = sum(c for row, c in zip(problem.rows, problem.counts, strict=True) if row.piece.bucket is bucket)
            expected[places[first : first + count]] = RANKS * values[first : first + count]
            if not torch.equal(bucket.flat[mask], expected[mask]):
                raise SystemExit(f"update {update}: bucket {bucket.index} is not the sum of what was sent")
    return {"updates": updates, "tensors": len(problem.rows), "looked_at_all": int(looked_at_all)}


def contestants(model: Callable[[], nn.Module], device: torch.device) -> tuple[list[Contestant], dict[str, Any]]:
    found, checks = [], {}
    ways: dict[str, Callable[[list[Row]], Any]] = {"list": ListedRows}
    if device.type == "cuda":
        from fleetx.reduce.dgc_fused import FusedRows

        ways = {"kernels": FusedRows, **ways}
    for name, make in ways.items():
        problem = Problem(model(), device)
        way = make(problem.rows)
        checks[name] = check_choice(way, problem, updates=CHECKED_UPDATES if device.type == "cuda" else 3)
        found.append(Contestant(name, step_of(way, problem), prepare=problem.refill, ours=True, keeps=problem))
    problem = Problem(model(), device)
    found.append(Contestant("torch.topk", topk_step(problem), prepare=problem.refill, keeps=problem))
    found.append(Contestant("refill", problem.refill, keeps=problem))
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    found.append(Contestant("copy", lambda: target.copy_(source), floor_bytes=2 * source.nbytes))
    return found, {"checks": checks, "parameters": problem.numel, "tensors": len(problem.rows), "entries": sum(problem.counts)}


def figures_of(found: list[Contestant], device: torch.device, facts: dict[str, Any]) -> dict[str, Any]:
    copy = next(one for one in found if one.label == "copy")
    bandwidth = copy.floor_bytes / copy.median("wall")
    floor_ms = facts["parameters"] * FLOOR_BYTES / bandwidth * 1e3
    rows = {}
    for one in found:
        times = {f"{name}_ms": round(one.median(name) * 1e3, 4) for name in one.samples}
        rows[one.label] = {**times, **launches(one, device), "syncs": synchronisations(one, device)}
    for name, row in rows.items():
        shown = "  ".join(f"{key} {value}" for key, value in row.items() if value is not None)
        print(f"{name:12} {shown}", flush=True)
    print(f"floor {floor_ms:.3f} ms: {FLOOR_BYTES} bytes a parameter at {bandwidth / 1e12:.2f} TB/s")
    figures = {**facts, "bandwidth_tb_s": round(bandwidth / 1e12, 3), "floor_ms": round(floor_ms, 4), "rows": rows}
    if "kernels" in rows:
        worst = max(rows["kernels"]["single_ms"], rows["kernels"]["wall_ms"])
        figures["verdict"] = {"wanted_ms": LIMIT_MS, "found_ms": worst, "holds": worst <= LIMIT_MS}
        print(f"{'yes' if worst <= LIMIT_MS else 'NO'}: compress and put back in {worst} ms, wanted at most {LIMIT_MS}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small model, some rounds; nothing is kept")
    smoke = parser.parse_args().smoke
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not smoke:
        sys.exit("this bench times kernels and needs a GPU; --smoke runs it small on a CPU.")
    torch.manual_seed(0)
    small = lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 10))  # noqa: E731
    found, facts = contestants(small if smoke else Resnet50, device)
    for one in found:
        warm_up(one, device, BLOCK_SECONDS / (10 if smoke else 1))
    until = time.perf_counter() + (1.0 if smoke else SECONDS)
    facts["rounds"] = compete(found, device, most_rounds=ROUNDS, until=until)
    figures = figures_of(found, device, facts)
    if smoke:
        print(surroundings())
    else:
        publish("compress_step", figures)


if __name__ == "__main__":
    main()

"""Which parameters share a bucket. Fixed for the run: in the order given, one type to a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

SMALLEST_BUCKET_BYTES = 2**20
"""Below this a collective is all latency."""
BUCKETS_WANTED = 2
"""A small model is cut in two all the same: one bucket could not overlap with backward, and more cost more than they hide."""


def bucket_lengths(sizes: Sequence[int], *, cap: int) -> list[int]:
    """Cut a row of byte sizes into runs of at most `cap` bytes (a larger tensor stands alone); the runs' lengths."""
    lengths: list[int] = []
    room = 0
    for size in sizes:
        if lengths and size <= room:
            lengths[-1] += 1
            room -= size
        else:
            lengths.append(1)
            room = cap - size
    return lengths


def bucket_runs(named: Sequence[tuple[str, nn.Parameter]], *, bucket_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Choose the parameters of each bucket: in the order given, one type to a bucket."""
    total = sum(p.nbytes for _, p in named)
    cap = min(bucket_bytes, max(SMALLEST_BUCKET_BYTES, total // BUCKETS_WANTED))
    runs: list[list[tuple[str, nn.Parameter]]] = []
    for dtype in dict.fromkeys(p.dtype for _, p in named):
        same = [(name, p) for name, p in named if p.dtype == dtype]
        start = 0
        for length in bucket_lengths([p.nbytes for _, p in same], cap=cap):
            runs.append(same[start : start + length])
            start += length
    return runs

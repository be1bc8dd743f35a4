"""The gradient noise scale over real ranks: the small batch is each rank's own, the large one that of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.noise_reference import SIGNAL_SQ, TRACE, distributed, reference, samples, strategy

FLOAT32 = 1e-4
UPDATES = 10


def _rows(rank: int, micro: int, weighted: bool) -> int:
    """Unequal batches where they are weighed."""
    return 2 + (rank + micro) % 3 if weighted else 4


def _batches(size: int, merged: int, weighted: bool) -> list[list[list[Any]]]:
    """[update][rank][micro-step]"""
    return [
        [[samples(100 * (update * merged + m) + rank, _rows(rank, m, weighted)) for m in range(merged)] for rank in range(size)]
        for update in range(UPDATES)
    ]


def _measure(
    rank: int, size: int, every: int, merged: int, weighted: bool, form: str, settings: dict[str, Any]
) -> dict[str, Any]:
    model, optimizer = distributed(strategy(every, merged=merged, **settings))
    comm, sizes, seen = optimizer.pipeline.comm, [], []
    real = comm.all_reduce

    def counting(tensor: Any, mode: str = "sum") -> Any:
        sizes.append((tensor.numel(), str(tensor.dtype)))
        return real(tensor, mode)

    comm.all_reduce = counting
    for update in _batches(size, merged, weighted):
        for x in update[rank]:
            if form == "bare":
                model(x).backward()
                report = optimizer.step()
                optimizer.zero_grad()
            else:
                report = optimizer.minimize(model(x), weight=len(x) if weighted else None)
        seen.append(report.noise_scale)
    return {"seen": seen, "sizes": sizes}


CASES = [
    (1, False, "minimize", {}),
    (3, False, "minimize", {}),
    (1, True, "minimize", {}),
    (2, True, "minimize", {}),
    (1, False, "bare", {}),
    (1, False, "minimize", {"clip_norm": True, "on_nan_inf": "off"}),
    (1, False, "minimize", {"sync_batch_norm": True}),
]


@pytest.mark.parametrize(("merged", "weighted", "form", "settings"), CASES)
def test_two_ranks_find_the_same_noise_scale_and_it_is_that_of_the_data(
    merged: int, weighted: bool, form: str, settings: dict[str, Any]
) -> None:
    ranks = run_ranks(_measure, 2, 2, 1, merged, weighted, form, settings)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    windows = _batches(2, merged, weighted)
    assert ranks[0]["seen"][0] == pytest.approx(reference(windows[:1], weighted=weighted), rel=FLOAT32)
    assert ranks[0]["seen"][-1] == pytest.approx(reference(windows, weighted=weighted), rel=FLOAT32)
    # 8 samples are two micro-batches of 4; ten measurements of 4096 features.
    assert ranks[0]["seen"][-1] == pytest.approx(TRACE / SIGNAL_SQ / (1 if weighted else 4), rel=0.25)


def test_16_bits_on_the_wire_change_it_by_their_rounding() -> None:
    (exact, _), (narrow, _) = (
        [seen["seen"][-1] for seen in run_ranks(_measure, 2, 2, 1, 1, False, "minimize", settings)]
        for settings in ({}, {"bf16_allreduce": True})
    )
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.02)


def test_measuring_is_one_collective_of_three_numbers_in_every_third_update_and_off_is_none() -> None:
    off, on = (run_ranks(_measure, 2, 2, every, 1, False, "minimize", {})[0] for every in (0, 3))
    assert set(off["seen"]) == {None}
    extra = [size for size in on["sizes"] if size == (3, "torch.float64")]
    assert len(extra) == UPDATES // 3
    assert [size for size in on["sizes"] if size != (3, "torch.float64")] == off["sizes"]
    assert [value is None for value in on["seen"]] == [True, True] + [False] * (UPDATES - 2)


def _idle_rank(rank: int) -> list[float | None]:
    """Rank 1 has no samples in the second update, and no rank has any in the third."""
    model, optimizer = distributed(strategy(1, merged=2))
    seen = []
    for update in range(4):
        for micro in range(2):
            x = samples(10 * update + 2 * micro + rank, 4)
            idle = update == 2 or (update == 1 and rank == 1)
            report = optimizer.minimize(model(x), weight=0 if idle else 4)
        seen.append(report.noise_scale)
    return seen


def test_a_rank_with_the_weight_0_has_no_small_gradient_and_no_weight_at_all_measures_nothing() -> None:
    seen, other = run_ranks(_idle_rank, 2)
    assert seen == other
    nothing = samples(0, 4)[:0]
    windows = [
        [
            [samples(10 * update + 2 * micro + rank, 4) if update != 1 or rank == 0 else nothing for micro in range(2)]
            for rank in range(2)
        ]
        for update in (0, 1, 3)
    ]
    assert seen[1] == pytest.approx(reference(windows[:2], weighted=True), rel=FLOAT32)
    assert seen[2] == seen[1]
    assert seen[3] == pytest.approx(reference(windows, weighted=True), rel=FLOAT32)


def _run(rank: int, folder: str, first: int, last: int) -> list[float | None]:
    """Micro-steps `first` .. `last` of windows of three, from the checkpoint in `folder` and to it."""
    model, optimizer = distributed(strategy(1, merged=3))
    if first:
        fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    seen = [optimizer.minimize(model(samples(2 * i + rank, 2))).noise_scale for i in range(first, last)]
    fleet.save_checkpoint(folder, step=last, model=model, optimizer=optimizer)
    return seen


def test_ranks_that_stop_inside_a_window_go_on_to_the_bit(tmp_path: Path) -> None:
    wanted = run_ranks(_run, 2, str(tmp_path / "whole"), 0, 18)
    first = run_ranks(_run, 2, str(tmp_path / "parts"), 0, 10)
    second = run_ranks(_run, 2, str(tmp_path / "parts"), 10, 18)
    assert [a + b for a, b in zip(first, second, strict=True)] == wanted
    assert wanted[0][-1] is not None


def test_between_two_windows_the_means_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    (before, _) = run_ranks(_run, 2, str(tmp_path), 0, 9)
    (after,) = run_ranks(_run_more_alone, 1, str(tmp_path))
    assert after == before[-1]


def _run_more_alone(rank: int, folder: str) -> float | None:
    model, optimizer = distributed(strategy(5, merged=3))  # the next update is the fourth: it does not measure
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True)
    reports = [optimizer.minimize(model(samples(i, 2))) for i in range(3)]
    value: float | None = reports[-1].noise_scale
    return value

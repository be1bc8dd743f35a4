"""The line about a running job, from numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from fleetx.engine.report import Report
from fleetx.engine.sidecar import Verdict
from fleetx.monitor.line import RunState, duration_text, last_line, line, number_text, percent
from fleetx.monitor.ranks import slowest, summarize
from fleetx.monitor.record import Tally
from fleetx.monitor.sinks import scalars_of
from fleetx.monitor.split import zero_split


def test_a_line_tells_what_is_known_in_a_fixed_order() -> None:
    now = RunState(
        step=250,
        total_steps=1000,
        loss=0.21432,
        values={"acc": 0.961},
        steps_per_second=5.0,
        samples_per_second=41200.0,
        memory_bytes=310_000_000,
        bytes_sent=80_000,
        bytes_dense=320_000,
        period=4,
        loss_scale=32768.0,
        slowest=(3, 0.0502),
    )
    assert line(now) == (
        "━━━───────── 250/1,000 · loss 0.2143 · acc 0.961 · 41,200 samples/s · ETA 2:30 · mem 295.6 MiB"
        " · wire 80 kB (25 % of dense) · period 4 · scale 32,768 · worker 3 is waited for 50.2 ms a step"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert line(RunState(step=7)) == "step 7"
    assert line(RunState(step=7, steps_per_second=0.25)) == "step 7 · 4 s/step"
    assert line(RunState(step=7, loss_scale=1.0, bytes_dense=0, slowest=(1, 0.001), steps_per_second=10)) == "step 7 · 10 steps/s"


def test_the_last_line_tells_where_the_time_went() -> None:
    split = zero_split() | {"forward": 3.0, "backward": 4.0, "update": 1.0, "communication": 1.0, "data": 1.0}
    now = RunState(step=1000, loss=0.02, values={"acc": 0.978})
    told_line = last_line("finished", now, 10.0, split, (5_700_000, 7_600_000), (1, 2.5), "runs/one")
    assert told_line == (
        "finished after 0:10 · 1,000 steps · loss 0.02 · acc 0.978 · compute 80 % communication 10 % data and script 10 %"
        " · sent 5.7 MB (75 % of dense) · worker 1 was waited for 2.5 s · runs/one"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0:00"), (61, "1:01"), (3599.6, "1:00:00"), (7261, "2:01:01"), (200_000, "2 days 7 h")]
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.00012345, "0.000123"), (1.23456, "1.235"), (41234.5, "41,234"), (123456.0, "1.23e+05")]
)
def test_numbers(value: float, expected: str) -> None:
    assert number_text(value) == expected


def test_small_shares_keep_two_digits() -> None:
    assert [percent(share) for share in (1.0, 0.25, 0.0199, 0.00123, 0)] == ["100 %", "25 %", "2 %", "0.12 %", "0 %"]


def test_the_rank_that_waits_least_is_the_one_the_others_wait_for() -> None:
    def waits(seconds: float) -> dict[str, float]:
        return summarize(zero_split() | {"communication": seconds, "forward": 1.0})

    assert slowest({0: waits(2.0), 1: waits(0.25), 2: waits(1.0)}) == (1, 1.75)
    assert slowest({0: waits(2.0)}) is None


def test_speed_and_traffic_are_those_of_the_last_updates() -> None:
    tally = Tally()
    for second in range(100):
        tally.micro_step(50, 4)
        tally.micro_step(50, 4)
        tally.update(Report(due=True, _verdict=Verdict(True), bytes_sent=50, bytes_dense=400), ranks=2, ended_seconds=2 * second)
    assert (tally.steps_per_second(), tally.samples_per_second(), tally.wire()) == (0.5, 8.0, (100, 400))
    assert (tally.updates, tally.samples, tally.bytes_sent, tally.bytes_dense) == (100, 1600, 10_000, 40_000)


def test_dashboards_get_names_in_groups_and_no_empty_numbers() -> None:
    record = {"step": 1, "loss": 0.5, "grad_norm": None, "split": {"data": 0.25}, "values": {"acc": 1, "bad": None}, "pair": 2}
    expected = {"pair 2/fleetx/loss": 0.5, "pair 2/seconds/data": 0.25, "pair 2/values/acc": 1.0}
    assert scalars_of(record) == expected

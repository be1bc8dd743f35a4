"""Run folders read back, whole, resumed, killed and damaged; and what their numbers say."""

from __future__ import annotations

import html
import json
import os
import re
import time
from pathlib import Path

import pytest

from fleetx.errors import ConfigError
from fleetx.report import axis, curves, facts, markup, metrics, read, strip
from fleetx.report.curves import Point, means, thin
from fleetx.report.facts import facts_of, one_line, wire_words
from fleetx.report.line_chart import SPARSE, Chart, Horizontal, Line, line_chart
from fleetx.report.markup import data, tag
from fleetx.report.metrics import RankTimes, parse_lines, update_from
from fleetx.report.page import make_page
from fleetx.report.read import flat, read_run, run_names
from tests.helpers import run_folders
from tests.helpers.limits import within

# --- reading ----------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_with_all_its_updates(tmp_path: Path) -> None:
    run = read_run(run_folders.finished(tmp_path / "run", steps=100))
    assert [one.step for one in run.updates[1]] == list(range(1, 101))
    assert run.updates[1][3].loss == 1.0  # 2/sqrt(4)
    assert (run.name, run.problems, run.again) == ("run", [], 0)


def test_a_resumed_run_takes_the_place_of_what_it_does_again(tmp_path: Path) -> None:
    run = read_run(run_folders.resumed(tmp_path / "run"))
    updates = run.updates[1]
    assert [one.step for one in updates] == list(range(1, 101))
    assert {one.start for one in updates[50:]} == {2} and {one.loss for one in updates[50:]} == {1.0}
    assert run.again == 10
    assert curves.resumed_at(run) == [51]


def test_time_and_bytes_of_a_resumed_run_go_on_with_what_was_lost(tmp_path: Path) -> None:
    last = read_run(run_folders.resumed(tmp_path / "run")).updates[1][-1]
    assert last.total_seconds == pytest.approx(60 * 0.05 + 50 * 0.05)
    assert last.total_sent == 110 * int(run_folders.DENSE)


def test_a_start_supersedes_only_its_own_pair(tmp_path: Path) -> None:
    lines = [run_folders.line(step, pair=pair) for step in (1, 2, 3) for pair in (1, 2)]
    lines += [run_folders.line(2, start=2, pair=1)]
    run = read_run(run_folders.write_run(tmp_path / "run", lines))
    assert {pair: [one.step for one in updates] for pair, updates in run.updates.items()} == {1: [1, 2], 2: [1, 2, 3]}


def test_half_a_line_at_the_end_is_no_damage(tmp_path: Path) -> None:
    run = read_run(run_folders.killed(tmp_path / "run"))
    assert len(run.updates[1]) == 40
    assert run.problems == ["line 41 of metrics.jsonl was cut off, as by a kill"]


def test_a_line_cut_off_before_the_next_start_is_no_damage(tmp_path: Path) -> None:
    first, second = (json.dumps(run_folders.line(step, start=step)) for step in (1, 2))
    for between in (f"{second[:40]}\n", second[:40]):  # with an end of line, as Monitor adds it, and without
        updates, problems = parse_lines(f"{first}\n{between}{second}\n")
        assert [one.step for one in updates] == [1, 2]
        assert problems == ["line 2 of metrics.jsonl was cut off, as by a kill"]


def test_a_damaged_line_in_the_middle_is_named_and_the_rest_is_read() -> None:
    whole = [json.dumps(run_folders.line(step)) for step in (1, 2, 3)]
    updates, problems = parse_lines("\n".join([whole[0], "\x00\x00", whole[1], '["no object"]', '{"no": "step"}', whole[2], ""]))
    assert [one.step for one in updates] == [1, 2, 3]
    assert problems == [f"line {place} of metrics.jsonl cannot be read" for place in (2, 4, 5)]


def test_of_many_damaged_lines_the_rest_are_counted() -> None:
    _, problems = parse_lines("?\n" * 20 + json.dumps(run_folders.line(1)) + "\n")
    assert len(problems) == 9 and problems[-1] == "12 more lines of metrics.jsonl cannot be read"


@pytest.mark.parametrize("value", [None, "text", True, float("nan"), float("inf"), 10**400, [1], {}])
def test_what_is_no_number_is_none_and_not_fatal(value: object) -> None:
    line = run_folders.line(
        1, loss=value, lr=value, samples=value, split=value, values={"acc": value}, ranks=value, trust_ratios=value
    )
    update = update_from(line)
    assert update is not None
    assert (update.loss, update.lr, update.samples, update.values["acc"]) == (None,) * 4
    assert (update.split, update.ranks, update.trust_ratios) == ({}, None, None)


@pytest.mark.parametrize("name", ["environment.json", "summary.json", "memory.json", "strategy.yaml"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 1_500, b"null", b"a: [1, &x 2, *x"])
def test_any_damaged_file_leaves_a_page(tmp_path: Path, name: str, content: bytes) -> None:
    folder = run_folders.finished(tmp_path / "run", steps=5)
    (folder / name).write_bytes(content)
    assert "<h1>run</h1>" in make_page([read_run(folder)])


def test_strange_shapes_in_sound_files_leave_a_page(tmp_path: Path) -> None:
    folder = run_folders.finished(tmp_path / "run", steps=5)
    (folder / "environment.json").write_text(json.dumps({"starts": [3, {"pairs": [None, 3], "hosts": 3, "total_steps": "x"}]}))
    (folder / "memory.json").write_text(json.dumps({"kind": 3, "curves": [3, {"seconds": [1], "bytes": ["x"], "marks": [3]}]}))
    (folder / "summary.json").write_text(json.dumps({"state": 3, "steps": "x", "values": [1], "ranks": {"x": 1}}))
    assert "<h1>run</h1>" in make_page([read_run(folder)])


def test_an_update_that_is_all_there_is_leaves_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    page = make_page([read_run(tmp_path)])
    assert "throughput" not in page and "peak memory" not in page


def test_a_run_without_an_update_says_so(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")
    run = read_run(tmp_path)
    assert "no update has been logged yet" in make_page([run])
    assert "no update yet" in one_line(run.name, facts_of(run))


def test_a_folder_that_is_none_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not there: a run folder.* holds metrics\.jsonl, environment\.json or summary\.json"):
        read_run(tmp_path / "nowhere")
    run_folders.finished(tmp_path / "runs" / "a", steps=2)
    with pytest.raises(ConfigError, match=r"is no run folder: .* Run folders in it: .*runs/a"):
        read_run(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"metrics.jsonl is a file: .* Write .*runs/a\."):
        read_run(tmp_path / "runs" / "a" / "metrics.jsonl")


def test_a_run_without_a_summary_runs_while_its_metrics_grow(tmp_path: Path) -> None:
    folder = run_folders.killed(tmp_path / "run")
    assert facts_of(read_run(folder)).state == "running"
    long_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert facts_of(read_run(folder)).state == "no end written"


def test_the_summary_of_an_earlier_start_is_not_taken_for_the_end(tmp_path: Path) -> None:
    folder = run_folders.resumed(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"state": "stopped", "start": 1, "steps": 60}))
    facts = facts_of(read_run(folder))
    assert (facts.state, facts.steps) == ("running", 100)


def test_names_of_runs_tell_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    assert run_names(folders) == ["a/run", "b/run", "other"]
    with pytest.raises(ConfigError, match="given twice"):
        run_names([tmp_path, tmp_path / "."])


def test_settings_of_settings_are_named_by_their_path() -> None:
    assert flat({"lars": True, "lars_configs": {"epsilon": 0, "more": {"x": 1}}, "empty": {}}) == {
        "lars": True,
        "lars_configs.epsilon": 0,
        "lars_configs.more.x": 1,
        "empty": {},
    }


def test_logs_lose_colours_and_keep_what_a_bar_showed_last() -> None:
    assert read.clean("\x1b[31mred\x1b[0m\n 1%\r 50%\r100%\r\nbell\x07") == "red\n100%\nbell\N{REPLACEMENT CHARACTER}"


def test_of_a_long_log_the_end_is_shown_and_a_traceback_comes_first(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("".join(f"line {place}\n" for place in range(100_000)))
    (tmp_path / "workerlog.1").write_text("Traceback (most recent call last):\nValueError: no\n")
    (tmp_path / "workerlog.2").symlink_to(tmp_path / "gone")
    (tmp_path / "workerlog.3").write_text("\n")
    tails = read.log_tails(tmp_path)
    assert list(tails) == [1, 0]
    assert tails[0].splitlines()[-1] == "line 99999" and len(tails[0].splitlines()) == read.TAIL_LINES


# --- facts ------------------------------------------------------------------------------------------------------------------


def test_facts_of_a_finished_run(tmp_path: Path) -> None:
    facts = facts_of(read_run(run_folders.finished(tmp_path / "run")))
    assert (facts.state, facts.steps, facts.seconds, facts.loss) == ("finished", 100, 5.0, 0.2)
    assert facts.values == {"acc": 0.99} and facts.rate == pytest.approx(256 / 0.05)
    assert facts.sent == facts.dense == 100 * int(run_folders.DENSE)


def test_the_best_value_is_the_least_loss_and_the_most_accuracy_where_it_came_first() -> None:
    lines = [(2.0, 0.1), (0.5, 0.9), (None, 0.9), (0.7, 0.3)]
    texts = [json.dumps({"step": step, "loss": loss, "values": {"acc": acc}}) for step, (loss, acc) in enumerate(lines, start=1)]
    updates, _ = parse_lines("\n".join(texts) + "\n")
    assert facts.best_values(updates) == {"loss": (0.5, 2), "acc": (0.9, 2)}
    assert facts.is_less_better("val_loss") and facts.is_less_better("top1_error") and not facts.is_less_better("acc")


def test_facts_without_a_summary_come_from_the_updates(tmp_path: Path) -> None:
    folder = run_folders.finished(tmp_path / "run")
    whole = facts_of(read_run(folder))
    (folder / "summary.json").unlink()
    found = facts_of(read_run(folder))
    assert found.rate == pytest.approx(whole.rate) and found.rate_unit == "samples/s"
    assert (found.steps, found.loss, found.sent, found.memory_bytes) == (whole.steps, whole.loss, whole.sent, whole.memory_bytes)


def test_one_rank_has_no_bytes_to_tell(tmp_path: Path) -> None:
    lines = [run_folders.line(step, bytes_sent=0, bytes_dense=0) for step in (1, 2)]
    run = read_run(run_folders.write_run(tmp_path / "run", lines))
    assert facts_of(run).sent is None and "On the wire" not in make_page([run])


def test_bytes_are_told_against_dense() -> None:
    assert wire_words(25, 100) == "75 % less than dense"
    assert wire_words(100, 100) == "as much as dense"
    assert wire_words(130, 100) == "130 % of what dense would send"


def test_the_line_for_the_terminal_holds_the_numbers(tmp_path: Path) -> None:
    run = read_run(run_folders.localsgd(tmp_path / "run"))
    line = one_line(run.name, facts_of(run))
    assert line.startswith("run: finished, 400 steps in 16.2 s, loss ") and line.endswith("163 MB sent, 75 % less than dense")


# --- who was waited for -----------------------------------------------------------------------------------------------------


def test_the_rank_that_waits_least_is_the_one_waited_for() -> None:
    times = {0: RankTimes(0.1, 0.05, 0.04, 0.01), 1: RankTimes(0.1, 0.05, 0.01, 0.04), 2: RankTimes(0.1, 0.06, 0.03, 0.01)}
    found = facts.waited_for(times)
    assert found is not None and (found.rank, found.cause) == (1, "data") and found.seconds == pytest.approx(0.03)
    words = facts.waiting_words(times)
    assert words == "Worker 1 kept the others waiting 30 ms a step (30 % of it): it took longer over data and script."


def test_a_small_difference_is_not_told_as_waiting() -> None:
    times = {rank: RankTimes(0.1, 0.05, 0.04 + 0.0001 * rank, 0.01) for rank in range(3)}
    assert facts.waiting_words(times) == "No worker kept the others waiting for more than 2% of a step."
    assert facts.waiting_words({0: times[0]}) is None


def test_times_of_ranks_are_those_of_one_update_though_they_tell_of_different_ones(tmp_path: Path) -> None:
    times_of_ranks = {"0": {"seconds": 1.0, "compute": 0.5, "communication": 0.4, "data": 0.1},
            "1": {"seconds": 2.0, "compute": 1.6, "communication": 0.2, "data": 0.2}}  # fmt: skip
    lines = [run_folders.line(1), run_folders.line(2, ranks=times_of_ranks)]
    times = facts.times_by_rank(read_run(run_folders.write_run(tmp_path / "run", lines)))
    assert times[0].communication == pytest.approx(0.4 * 0.05) and times[1].communication == pytest.approx(0.1 * 0.05)


# --- fewer points -----------------------------------------------------------------------------------------------------------


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    points: list[Point] = [(step, 100.0 if step == 7777 else -50.0 if step == 123 else step % 3) for step in range(20_000)]
    kept = thin(points, columns=100)
    assert len(kept) <= 2 * 100 + 2
    assert {(7777, 100.0), (123, -50.0), points[0], points[-1]} <= set(kept)
    assert [place for place, _ in kept] == sorted({place for place, _ in kept})


def test_thinning_leaves_few_points_alone() -> None:
    points: list[Point] = [(1, 1.0), (2, None), (3, 2.0)]
    assert thin(points) == points


def test_thinning_keeps_gaps() -> None:
    points: list[Point] = [(step, None if 4000 <= step < 6000 else 1.0) for step in range(10_000)]
    assert any(value is None and 4000 <= place < 6000 for place, value in thin(points, columns=50))


def test_means_are_of_all_points_of_a_column() -> None:
    assert means([(step, float(step % 2)) for step in range(100)], columns=2) == [(24.5, 0.5), (74.5, 0.5)]
    assert means([(0, None), (1, None)], columns=1) == [(0.5, None)]


def test_windows_hold_whole_periods_of_local_sgd(tmp_path: Path) -> None:
    run = read_run(run_folders.localsgd(tmp_path / "run"))
    communication = {round(parts["communication"], 9) for place, parts in curves.split_means(run.updates[1]) if place > 210}
    assert len(communication) == 1  # one averaging in each window of 8


def test_throughput_counts_the_time_between_updates() -> None:
    lines = [run_folders.line(step, seconds=0.1 * step, samples=10) for step in range(1, 6)]
    updates = [update for update in map(update_from, lines) if update is not None]
    assert [rate for _, rate in curves.throughput(updates, "samples/s")] == pytest.approx([100.0] * 4)


def test_runs_with_and_without_samples_are_compared_by_steps(tmp_path: Path) -> None:
    lines = [run_folders.line(step, samples=None) for step in (1, 2, 3)]
    runs = [read_run(run_folders.write_run(tmp_path / "a", lines)), read_run(run_folders.finished(tmp_path / "b"))]
    assert curves.rate_unit(curves.tracks_of(runs)) == "steps/s" and curves.rate_unit(curves.tracks_of(runs[1:])) == "samples/s"


# --- axes and words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 0, [0.0]), (3, 3, None), (-5, 5, None)]
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float] | None) -> None:
    found = axis.straight(low, high)
    assert len(found.ticks) >= 2 and all(found.low <= tick <= found.high for tick in found.ticks)
    assert expected is None or set(expected) <= set(found.ticks)


def test_a_log_axis_names_powers_of_ten_and_keeps_zero_at_its_foot() -> None:
    found = axis.logarithmic(1e-4, 10.0)
    assert {1e-3, 0.01, 0.1, 1.0, 10.0} <= {round(tick, 9) for tick in found.ticks}
    assert found.place(0.0) == 0.0 and 0 < found.place(1e-4) < found.place(1.0) < 1


def test_steps_have_whole_ticks() -> None:
    assert all(tick == int(tick) for tick in axis.exact(1, 3, whole=True).ticks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (axis.plain(0.012345), "0.01235"), (axis.plain(12345.6), "12,346"), (axis.plain(1.2e-7), "1.2e-07"),
        (axis.plain(0), "0"), (axis.plain(-3.0), "-3"), (axis.size(1_500_000), "1.5 MB"), (axis.size(12), "12 bytes"),
        (axis.short_time(0.0123), "12.3 ms"),
        (axis.duration(61), "1 min 1 s"), (axis.duration(3720), "1 h 2 min"), (axis.duration(5), "5 s"),
        (axis.duration(59.99), "60 s"), (axis.share(1, 8), "12.5 %"), (axis.share(0.0004, 1), "0.04 %"),
    ],
)  # fmt: skip
def test_numbers_are_told_shortly(text: str, expected: str) -> None:
    assert text == expected


# --- markup, tables, strips -------------------------------------------------------------------------------------------------


def test_texts_are_escaped_in_markup_attributes_and_data() -> None:
    bad = "</script><script>alert('1')&\""
    assert "<script>" not in tag("p", bad, title=bad)
    assert tag("p", tag("b", "x")) == "<p><b>x</b></p>"
    island = data({"name": bad})
    assert island.count("<") == 2 and json.loads(island[island.index(">") + 1 : island.rindex("<")])["name"] == bad


def test_settings_that_differ_come_first() -> None:
    columns = [{"same": 1, "lars": True}, {"same": 1, "k": 4}]
    assert markup.differing(columns) == (["lars", "k"], ["same"])
    shown = markup.side_by_side(["a", "b"], columns, "settings")
    assert shown is not None and shown.index("lars") < shown.index("1 of the settings is the same")


def test_the_strip_is_a_picture_with_a_cell_for_each_layer_and_step() -> None:
    from io import BytesIO

    from PIL import Image

    rows, low, high = strip.shade_rows([[0.01, 0.1, 1.0], [None, 0.0, 1.0]])
    picture = Image.open(BytesIO(strip.png(rows)))
    picture.load()
    assert picture.size == (3, 2) and (low, high) == (0.01, 1.0)
    shades = [[picture.convert("RGBA").getpixel((x, y)) for x in range(3)] for y in range(2)]
    assert shades[0][0] == (*strip.SHADES[0], 255) and shades[0][2] == (*strip.SHADES[-1], 255)
    assert shades[1][0][3] == 0 and shades[1][1] == shades[0][0]


# --- the page as text -------------------------------------------------------------------------------------------------------


def test_a_page_names_no_address_outside_itself(tmp_path: Path) -> None:
    page = html.unescape(make_page([read_run(run_folders.lars(tmp_path / "run"))]))
    assert "default-src 'none'" in page and "img-src data:" in page
    assert "http://" not in page and "https://" not in page and " src=" not in page


@pytest.mark.campaign
def test_three_runs_of_twenty_thousand_updates_make_a_small_page_soon(tmp_path: Path) -> None:
    folder = run_folders.long(tmp_path / "run")
    with within(300, "the page of three long runs"):
        runs = [read_run(folder, name) for name in "abc"]
        page = make_page(runs)
    assert len(page.encode()) < 3_000_000
    spike = max(one.loss or 0 for one in runs[0].updates[1] if one.step > 10_000)
    assert f"{spike:.6g}" in page


def test_each_pair_of_models_has_its_own_line_and_strategy(tmp_path: Path) -> None:
    page = make_page([read_run(run_folders.several_pairs(tmp_path / "gan"))])
    assert "gan · Generator" in page and "gan · Critic" in page
    assert '"n":"Generator"' in page and '"n":"Critic"' in page


def test_a_loss_that_was_not_finite_is_told(tmp_path: Path) -> None:
    page = make_page([read_run(run_folders.failed(tmp_path / "run"))])
    assert "the loss was missing or not finite 5 times, first at step 26." in page
    assert "the last that was finite" in page


@pytest.mark.parametrize(
    ("written", "read"), [(1e300, None), (-1e300, None), (1e-310, 0.0), (10**400, None), (float("nan"), None), (2.5, 2.5)]
)
def test_numbers_that_no_scale_can_hold_are_left_out(written: float, read: float | None) -> None:
    assert metrics.number(written) == read
    assert metrics.whole(10**400) is None


@pytest.mark.parametrize(("count", "has_markers"), [(SPARSE, True), (SPARSE + 1, False)])
def test_a_line_of_few_points_shows_each_of_them(count: int, has_markers: bool) -> None:
    points: list[Point] = [(float(step), float(step)) for step in range(count)]
    across = Horizontal("step", "step", axis.exact(0, count, whole=True))
    chart = Chart("loss", "loss", [Line(0, "loss", points, 0)], [across])
    drawn = str(line_chart(chart))
    markers = re.findall(r'<path class="[^"]* dots mean"[^>]* d="([^"]*)"', drawn)
    assert [marker.count("h0") for marker in markers] == ([count] if has_markers else [])

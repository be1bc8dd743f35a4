"""`fleetx report` as a user types it: what it prints, where it writes, what it refuses; and that it does not wait for torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleetx import fleet
from fleetx.cli.main import main
from fleetx.cli.report import follow, read_runs, write_page
from fleetx.report.read import read_run
from tests.helpers import run_folders

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two runs in it."""
    run_folders.lars(tmp_path / "runs" / "lars", steps=40)
    run_folders.localsgd(tmp_path / "runs" / "localsgd", steps=40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_of_one_run_lies_in_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/lars"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("lars: finished, 40 steps in 2.2 s, 3 skipped, loss 0.") and printed[1:] == [
        "page: runs/lars/report.html"
    ]
    page = (runs / "runs" / "lars" / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert not list((runs / "runs" / "lars").glob(".*"))


def test_the_page_of_several_runs_lies_in_the_working_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/lars", "runs/localsgd", "--title", "A <b> title"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["lars", "localsgd", "page"]
    assert "<h1>A &lt;b&gt; title</h1>" in (runs / "report.html").read_text()


def test_out_names_the_page_and_png_a_picture(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    assert main(["report", "runs/lars", "runs/localsgd", "--out", "both.html", "--png", "both.png"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["page: both.html", "figure: both.png"]
    with Image.open(runs / "both.png") as picture:
        assert picture.size == (1440, 1000) and picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)


def test_a_table_has_a_line_for_every_update(runs: Path) -> None:
    import csv

    assert main(["report", "runs/lars", "runs/localsgd", "--csv", "both.csv"]) == 0
    with (runs / "both.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["lars"] * 40 + ["localsgd"] * 40
    assert [int(row["step"]) for row in rows[40:]] == list(range(1, 41))
    [updates] = read_run(runs / "runs" / "lars").updates.values()
    assert [row["loss"] for row in rows[:40]] == ["" if one.loss is None else repr(one.loss) for one in updates]


def test_a_run_under_way_is_followed_until_it_ends(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, page = runs / "runs" / "lars" / "summary.json", runs / "page.html"
    ended = summary.read_text()
    summary.unlink()
    os.utime(runs / "runs" / "lars" / "metrics.jsonl")
    pages: list[bool] = []

    def wait(seconds: float) -> None:
        pages.append('http-equiv="refresh"' in page.read_text())
        if len(pages) == 2:
            summary.write_text(ended)

    write_page(page, read_runs([Path("runs/lars")]), None, is_live=True)
    follow([Path("runs/lars")], page, None, wait)
    assert pages == [True, True] and 'http-equiv="refresh"' not in page.read_text()


def test_several_runs_are_compared_by_best_values_and_speed(runs: Path) -> None:
    assert main(["report", "runs/lars", "runs/localsgd"]) == 0
    page = (runs / "report.html").read_text()
    assert ">best loss<" in page and ">speed-up<" in page and "1.00 x" in page


def test_a_picture_of_one_rank_with_few_numbers_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": null}\n')
    assert main(["report", str(tmp_path), "--png", str(tmp_path / "x.png")]) == 0


def test_a_missing_matplotlib_is_told_with_the_line_to_type(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", "runs/lars", "--png", "x.png"]) == 2
    assert capsys.readouterr().err == 'fleetx: --png needs matplotlib: pip install "fleetx[demo]".\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/nothing"], "is not there: a run folder"),
        (["runs"], "Run folders in it: runs/lars runs/localsgd"),
        (["runs/lars", "runs/../runs/lars"], "was given twice"),
        (["runs/lars", "--out", "page.txt"], "a file that ends in .html"),
        (["runs/lars", "--out", "nowhere/page.html"], "in a folder that is there"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_told_with_the_way_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "runs" / "lars" / "report.html").mkdir()
    assert main(["report", "runs/lars"]) == 2
    assert "cannot be written: Is a directory. Choose another place with --out." in capsys.readouterr().err


def test_an_error_of_a_run_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [run_folders.line(1)]
    run_folders.write_run(tmp_path / "run", lines, summary=run_folders.summary(lines, state="failed", error="\x1b[2Jno"))
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.usefixtures("alone")
def test_a_run_that_monitor_has_written_is_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(8, 2)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy())
    with fleet.Monitor(tmp_path / "run", total_steps=20) as monitor:
        for step in range(1, 21):
            monitor.log(optimizer.minimize(model(torch.randn(4, 8)).square().mean()), samples=4, place=step)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("run: finished, 20 steps in ") and ", place 20, " in printed and " samples/s, peak " in printed
    run = read_run(tmp_path / "run")
    assert [one.values["place"] for one in run.updates[1]] == list(range(1, 21)) and run.problems == []
    assert all(sum(one.split.values()) > 0 and one.samples == 4 for one in run.updates[1])
    assert run.strategies[1]["on_nan_inf"] == "stop" and run.starts[0]["pairs"][0]["parameters"] == 18


def test_a_report_is_made_without_torch(runs: Path) -> None:
    code = "import sys; from fleetx.cli.main import main; main(['report', 'runs/lars']); sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "page: runs/lars/report.html" in done.stdout

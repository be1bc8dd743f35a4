"""Guards the documentation whole: every block of Python and every command of every page runs, and prints what the page says."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.documents import PYTHON, ROOT, Ended, clean_environment, run_command
from tests.helpers.pages import (
    AT_ONCE,
    COMMAND_LIMIT_SECONDS,
    PAGE_LIMIT_SECONDS,
    PAGES,
    TEXTS,
    WITH_COMMANDS,
    WITH_PYTHON,
    Runner,
    require_true_commands,
    require_true_python,
    running_pages,
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    yield from running_pages(PAGES, tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: str, runner: Runner) -> None:
    require_true_python(page, runner)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run(page: str, runner: Runner) -> None:
    require_true_commands(page, runner)


def test_every_bench_of_the_page_of_benchmarks_can_be_asked_for_help(tmp_path: Path, runner: Runner) -> None:
    scripts = sorted(set(re.findall(r"`python -m (bench\.\w+\.run)", TEXTS["docs/benchmarks.md"])))
    assert len(scripts) > 20

    def asked(script: str) -> Ended:
        folder = tmp_path / script
        folder.mkdir()
        for name in ("bench", "tests"):
            (folder / name).symlink_to(ROOT / name)
        return runner.forker.run(script, "--help", folder=folder, limit_seconds=PAGE_LIMIT_SECONDS)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for script, ended in zip(scripts, pool.map(asked, scripts), strict=True):
            assert ended.code == 0 and "usage:" in ended.output, f"{script}: {ended.output}"


def test_local_sgd_and_dgc_run_on_two_workers_as_their_pages_have_them(tmp_path: Path, runner: Runner) -> None:
    for name in ("localsgd", "dgc"):
        block = next(block for block in PAGES[f"docs/strategies/{name}.md"] if block.language in PYTHON)
        (tmp_path / f"{name}.py").write_text(block.text, encoding="utf-8")
    environment = clean_environment()

    def run(name: str) -> Ended:
        words = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", "--log_dir", f"log-{name}", f"{name}.py"]
        return run_command(words, folder=tmp_path, environment=environment, limit_seconds=COMMAND_LIMIT_SECONDS)

    averaged, compressed = run("localsgd"), run("dgc")
    assert averaged.code == 0, averaged.output
    # Update 40 is two after the round of 38; both workers' waits are told.
    assert re.search(r"^4 True \{0: [\d.e-]+, 1: [\d.e-]+\}$", averaged.output, flags=re.MULTILINE), averaged.output
    assert load_file(tmp_path / "model.safetensors")["3.weight"].shape == (4, 32)
    assert compressed.code == 0, compressed.output
    assert "dgc: 0.001 of the entries of each large tensor are sent, 8 bytes each" in compressed.output
    figures = re.search(r"^(\d+) (0\.\d+) (\d+\.\d+)$", compressed.output, flags=re.MULTILINE)
    assert figures is not None, compressed.output
    # Of two matrices of 32,768 entries 32 each, 8 bytes of each of them; 576 biases, and what all updates carry.
    assert 64 * 8 + 576 * 4 < int(figures[1]) < 3000 and (64 + 576) / 66112 < float(figures[2]) < 0.0105 and float(figures[3]) > 0


def test_recompute_prints_the_very_number_that_is_printed_without_it(tmp_path: Path, runner: Runner) -> None:
    block = next(block for block in PAGES["docs/strategies/recompute.md"] if block.language in PYTHON)
    without = block.text.replace("lr=0.001), strategy)", "lr=0.001))")
    assert without != block.text
    printed = []
    for name, text in (("with", block.text), ("without", without)):
        script = tmp_path / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        ended = runner.forker.run(script, folder=tmp_path, limit_seconds=PAGE_LIMIT_SECONDS)
        assert ended.code == 0, ended.output
        printed.append(ended.output.splitlines()[-1])
    assert float(printed[0]) > 0 and printed[0] == printed[1]


def test_the_applications_script_refuses_a_misspelt_flag_and_scores_on_two_workers(tmp_path: Path, runner: Runner) -> None:
    page = "docs/applications.md"
    (script,) = (block.text for block in PAGES[page] if block.title == "train.py")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    misspelt = runner.forker.run(tmp_path / "train.py", "--batchsize", "48", folder=tmp_path, limit_seconds=PAGE_LIMIT_SECONDS)
    assert "ConfigError: unknown argument '--batchsize'. Did you mean `batch_size`?" in misspelt.output
    trained = next(ended for _, text, ended in runner.start(page).result().commands if "gradient_merge.k_steps 2" in text)
    assert isinstance(trained, Ended)
    scores = ast.literal_eval(trained.output.splitlines()[-1])
    assert scores["count"] == 360 and 0 <= scores["acc1"] <= scores["acc5"] <= 1

"""Ray Train's workers train as a plain fleet job does: fleet.init() adopts the process group that Ray has made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ray_runs
from tests.helpers.harness import run_ranks
from tests.helpers.launchers import MARK, find_marked, wait_until

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.campaign  # a cluster takes half a minute to start

LIMIT_SECONDS = 900


def run_driver(script: str | Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A Ray cluster of its own, in one process group with all it starts, marked so that what is left behind is found."""
    launched_by = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
    env = {name: value for name, value in os.environ.items() if name not in launched_by}
    env |= {MARK: str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    env["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "600"  # Ray's own 60 s pass on a busy machine, and Ray begins again for ever
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


def train_plainly(rank: int) -> dict[str, Any]:
    return {name: ray_runs.train(rank, parts) for name, parts in ray_runs.STRATEGIES.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ray")
    ended = run_driver(ray_runs.__file__, str(folder), folder=folder)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    wait_until(lambda: find_marked(str(folder)) == [], 20)  # all of the cluster has ended
    read = [[json.loads((folder / f"{name}-{rank}.json").read_text()) for name in ("rank", "resumed")] for rank in range(2)]
    return [{**first, "resumed": again} for first, again in read]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return run_ranks(train_plainly, 2)


def farthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def test_init_adopts_rays_process_group(told: list[dict[str, Any]]) -> None:
    assert [of_a_rank["place"] for of_a_rank in told] == [[2, 1, 0, "cpu"], [2, 1, 1, "cpu"]]
    assert [of_a_rank["endpoints"] for of_a_rank in told] == [2, 2]


def test_a_neutral_strategy_trains_as_rays_own_ddp(told: list[dict[str, Any]]) -> None:
    for of_a_rank in told:
        theirs, ours = of_a_rank["ray"], of_a_rank["neutral"]
        assert theirs["class"] == "DistributedDataParallel"
        assert len(ours["losses"]) == 14
        assert farthest(ours["losses"], theirs["losses"]) < 1e-6
        assert farthest(ours["weights"], theirs["weights"]) < 1e-6


@pytest.mark.parametrize("name", ray_runs.STRATEGIES)
def test_a_strategy_trains_as_in_a_plain_loop(told: list[dict[str, Any]], plain: list[dict[str, Any]], name: str) -> None:
    for through, without in zip(told, plain, strict=True):
        assert farthest(through[name]["losses"], without[name]["losses"]) < 1e-6
        assert farthest(through[name]["weights"], without[name]["weights"]) < 1e-6


def test_workers_that_ray_starts_again_go_on_from_the_reported_checkpoint_to_the_bit(told: list[dict[str, Any]]) -> None:
    for of_a_rank in told:
        assert of_a_rank["resumed"]["step"] == 7
        assert of_a_rank["resumed"]["weights"] == of_a_rank["localsgd"]["weights"]


def test_a_model_that_ray_has_wrapped_is_refused_with_the_option_that_leaves_it_bare(told: list[dict[str, Any]]) -> None:
    for of_a_rank in told:
        assert of_a_rank["wrapped"].startswith("StrategyConflict: localsgd claims `reduce`")
        assert "prepare_model(model, parallel_strategy=None)" in of_a_rank["wrapped"]
        assert of_a_rank["unwrapped"] == "nothing raised"


def test_should_stop_says_that_it_hears_no_signal_in_rays_thread(told: list[dict[str, Any]]) -> None:
    for of_a_rank in told:
        assert of_a_rank["stop"]["answers"] == [False, False]
        assert ["save at regular steps" in text for text in of_a_rank["stop"]["heard"]] == [True]


def test_the_example_runs_and_at_most_ten_of_its_lines_are_of_fleetx(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    example = Path(__file__).parents[2] / "examples" / "ray_train.py"
    assert 0 < sum("  # fleetx" in line for line in example.read_text(encoding="utf-8").splitlines()) <= 10
    ended = run_driver(example, "--epochs", "3", folder=tmp_path)
    told = ended.stdout[-2000:] + ended.stderr[-2000:]
    assert re.search(r"^accuracy (8[5-9]|9\d)\.\d\d% after epoch 3$", ended.stdout, re.MULTILINE), told

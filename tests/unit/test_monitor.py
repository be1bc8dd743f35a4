"""fleet.Monitor on one worker: what it writes, what it refuses, what it leaves alone."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.config.secret_texts import command_without_secrets, without_secrets
from fleetx.dist import heartbeat
from fleetx.dist.heartbeat import Phase
from fleetx.engine.setup import registry
from fleetx.errors import ConfigError, FleetWarning
from fleetx.monitor import lasting_files
from fleetx.monitor import monitor as monitors
from fleetx.monitor.folder import Folder, last_record
from fleetx.monitor.monitor import counted_micro_steps
from fleetx.monitor.split import MOST_EVENTS, PARTS, DeviceStopwatch
from tests.helpers.models import batch, mlp
from tests.helpers.monitor_runs import environment, pair, records, summary, train


@pytest.fixture(autouse=True)
def closed_afterwards() -> Any:
    yield
    if monitors._open is not None:
        monitors._open.close()
    registry.forget()


def quiet(folder: Path, **settings: Any) -> fleet.Monitor:
    return fleet.Monitor(folder, show=False, tensorboard=False, **settings)


def loss_of(model: nn.Module, index: int = 0) -> torch.Tensor:
    x, y = batch(index)
    return nn.functional.cross_entropy(model(x), y)


def test_every_update_is_a_line_with_the_numbers_of_its_report(tmp_path: Path) -> None:
    losses = train(str(tmp_path / "run"), 5)
    lines = records(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == losses
    assert all(line["lr"] == 0.1 and line["samples"] == 8 and line["updated"] and line["pair"] == 1 for line in lines)
    assert [line["start"] for line in lines] == [1] * 5


def test_the_folder_holds_strategy_environment_and_summary(tmp_path: Path) -> None:
    train(str(tmp_path / "deep" / "run"), 4)
    folder = tmp_path / "deep" / "run"
    assert fleet.DistributedStrategy.load(folder / "strategy.yaml").to_dict() == fleet.DistributedStrategy().to_dict()
    start = environment(folder)["starts"][0]
    assert (start["ranks"], start["nodes"], start["device"], start["backend"]) == (1, 1, "cpu", None)
    assert start["torch"] == torch.__version__ and start["total_steps"] == 4
    assert start["pairs"] == [
        {"model": "Sequential", "parameters": sum(p.numel() for p in mlp().parameters()), "optimizer": "SGD"}
    ]
    ended = summary(folder)
    assert (ended["state"], ended["steps"], ended["samples"], ended["error"]) == ("finished", 4, 32, None)
    assert not list(folder.glob(".*"))


def test_the_split_adds_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    train(str(tmp_path), 20)
    lines = records(tmp_path)
    told = sum(sum(line["split"].values()) for line in lines[1:])
    assert told == pytest.approx(lines[-1]["seconds"] - lines[0]["seconds"], rel=0.1, abs=0.05)
    for line in lines:
        assert set(line["split"]) == set(PARTS) and all(seconds >= 0 for seconds in line["split"].values())
        assert line["split"]["forward"] > 0 and line["split"]["backward"] > 0 and line["split"]["update"] > 0
    whole = {part: sum(line["split"][part] for line in lines) for part in PARTS}
    assert summary(tmp_path)["split"] == pytest.approx(whole, abs=1e-6)


def test_time_in_the_script_evaluation_and_saving_is_told_apart(tmp_path: Path) -> None:
    model, optimizer = pair()
    with quiet(tmp_path / "run") as watch:
        watch.log(optimizer.minimize(loss_of(model)))
        _busy(0.05)  # as a slow loader
        watch.log(optimizer.minimize(loss_of(model)))
        model.eval()
        with torch.no_grad():
            _Slow.seconds = 0.05
            model.append(_Slow())  # a forward that takes its time
            model(batch(0)[0])
        del model[-1]
        model.train()
        watch.log(optimizer.minimize(loss_of(model)))
    _, second, third = (line["split"] for line in records(tmp_path / "run"))
    assert second["data"] >= 0.05 and second["other"] == 0
    assert third["other"] >= 0.05


class _Slow(nn.Module):
    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _busy(self.seconds)
        return x


def _busy(seconds: float) -> None:
    import time

    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_a_merge_window_is_one_line_and_its_micro_steps_are_counted(tmp_path: Path) -> None:
    model, optimizer = pair(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    with quiet(tmp_path) as watch:
        for index in range(6):
            watch.log(optimizer.minimize(loss_of(model, index)), samples=8)
    lines = records(tmp_path)
    assert [(line["step"], line["micro_steps"], line["samples"]) for line in lines] == [(1, 3, 24), (2, 3, 24)]


def test_values_join_the_update_they_were_logged_with_or_the_last_one(tmp_path: Path) -> None:
    model, optimizer = pair()
    with quiet(tmp_path) as watch:
        watch.log(optimizer.minimize(loss_of(model)), acc=0.5, ratio=torch.tensor(0.25))
        watch.log(optimizer.minimize(loss_of(model)))
        watch.log(top1=1)
        watch.log(optimizer.minimize(loss_of(model)), bad=float("nan"))
    assert [line["values"] for line in records(tmp_path)] == [{"acc": 0.5, "ratio": 0.25}, {"top1": 1.0}, {"bad": None}]
    assert summary(tmp_path)["values"] == {"acc": 0.5, "ratio": 0.25, "top1": 1.0}


def test_trust_ratios_are_written_by_layer(tmp_path: Path) -> None:
    model, optimizer = pair(lars=True)
    with quiet(tmp_path) as watch:
        report = optimizer.minimize(loss_of(model))
        expected = report.trust_ratios.by_name
        watch.log(report)
    assert records(tmp_path)[0]["trust_ratios"] == pytest.approx(expected, rel=1e-5)


def test_memory_over_a_step_is_drawn_with_its_marks(tmp_path: Path) -> None:
    train(str(tmp_path), 6)
    drawn = json.loads((tmp_path / "memory.json").read_text())
    curve = drawn["curves"][0]
    assert drawn["kind"] == "resident" and curve["step"] == 3
    assert len(curve["seconds"]) == len(curve["bytes"]) >= 1 and min(curve["bytes"]) > 1e6
    assert [name for name, _ in curve["marks"]] == ["forward", "backward", "update"]


def test_two_pairs_have_a_strategy_file_each_and_their_own_lines(tmp_path: Path) -> None:
    first, first_optimizer = pair()
    with quiet(tmp_path) as watch:
        second, second_optimizer = pair(bf16_allreduce=True)  # after the monitor was made
        watch.log(first_optimizer.minimize(loss_of(first)))
        watch.log(second_optimizer.minimize(loss_of(second)))
    assert [line["pair"] for line in records(tmp_path)] == [1, 2]
    assert fleet.DistributedStrategy.load(tmp_path / "strategy.2.yaml").bf16_allreduce
    assert len(environment(tmp_path)["starts"][0]["pairs"]) == 2


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    train(str(tmp_path), 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"start": 1, "step": 4, "lo')  # cut off by a kill
    model, optimizer = pair()
    optimizer.pipeline.index = 2  # as a checkpoint of step 2 leaves it
    with quiet(tmp_path) as watch:
        for index in range(2):
            watch.log(optimizer.minimize(loss_of(model, index)))
    whole = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["start"] for line in whole] == [1, 1, 1, 2, 2]
    starts = environment(tmp_path)["starts"]
    assert [start["start"] for start in starts] == [1, 2]
    assert summary(tmp_path)["seconds"] > starts[1]["seconds_before"] >= 0


def test_a_run_that_begins_again_in_a_used_folder_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    train(str(tmp_path), 5)
    train(str(tmp_path), 2)
    assert [(line["start"], line["step"]) for line in records(tmp_path)] == [(1, 1), (1, 2)]
    (start,) = environment(tmp_path)["starts"]
    assert start["seconds_before"] == 0 and summary(tmp_path)["steps"] == 2
    assert len(records(tmp_path / "run-1")) == 5 and summary(tmp_path / "run-1")["steps"] == 5


def test_every_run_of_a_used_folder_is_kept_under_a_number_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (5, 3, 2):
        train(str(tmp_path), steps)
    assert [summary(tmp_path / name)["steps"] for name in (".", "run-1", "run-2")] == [2, 5, 3]
    assert {file.name for file in (tmp_path / "run-2").iterdir()} >= {"environment.json", "strategy.yaml", "metrics.jsonl"}
    said = [line for line in capsys.readouterr().out.splitlines() if "held an earlier run" in line]
    assert said == [f"fleetx: {tmp_path} held an earlier run, which is in {tmp_path}/run-{number} now." for number in (1, 2)]


def test_a_total_of_micro_steps_is_named_with_the_number_of_updates() -> None:
    assert (counted_micro_steps(200, 50, 4) or "").startswith(
        "fleetx: total_steps=200 is a number of updates, and this run made 50,"
    )
    assert "write total_steps=50" in (counted_micro_steps(203, 50, 4) or "")  # the rest of a window was not used
    for given in ((50, 50, 4), (None, 50, 4), (200, 200, 1), (200, 40, 4)):
        assert counted_micro_steps(*given) is None


def test_seconds_of_earlier_starts_count_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin({"start": 1})
    folder.write({"start": 1, "step": 9, "seconds": 40.0})
    folder.close()
    again = Folder(tmp_path)
    assert (again.start, again.seconds_before) == (2, 40.0)
    again.begin({"start": 2})
    again.write({"start": 2, "step": 12, "seconds": 2.0})
    again.close()
    last = Folder(tmp_path)
    last.close()
    assert last.seconds_before == 42.0
    assert last_record(tmp_path / "metrics.jsonl") == {"start": 2, "step": 12, "seconds": 2.0}


@pytest.mark.parametrize(
    ("error", "state", "told"),
    [
        (lambda: ValueError("no such file"), "failed", "ValueError: no such file"),
        (lambda: KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (lambda: SystemExit(3), "stopped", "SystemExit"),
    ],
)
def test_a_run_that_breaks_off_says_how(tmp_path: Path, error: Callable[[], BaseException], state: str, told: str) -> None:
    model, optimizer = pair()
    with pytest.raises(type(error())), quiet(tmp_path) as watch:
        watch.log(optimizer.minimize(loss_of(model)))
        raise error()
    assert (summary(tmp_path)["state"], summary(tmp_path)["error"]) == (state, told)
    assert len(records(tmp_path)) == 1


def test_training_with_a_monitor_has_the_bits_of_training_without(tmp_path: Path) -> None:
    def trained(watched: bool) -> list[torch.Tensor]:
        model, optimizer = pair(recompute=True, recompute_configs={"checkpoints": ["0", "2"]})
        watch = quiet(tmp_path) if watched else None
        for index in range(5):
            report = optimizer.minimize(loss_of(model, index))
            if watch is not None:
                watch.log(report)
        if watch is not None:
            watch.close()
        return [p.detach().clone() for p in model.parameters()]

    for mine, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert all(line["split"]["backward"] > 0 for line in records(tmp_path))


def test_nothing_is_left_on_the_model_afterwards(tmp_path: Path) -> None:
    model, optimizer = pair()
    with quiet(tmp_path) as watch:
        watch.log(optimizer.minimize(loss_of(model)))
        twin = copy.deepcopy(model)
        torch.save(twin, tmp_path / "whole.pt")  # hooks that cannot be written would show here
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert heartbeat.record.listener is None
    twin(batch(0)[0])


def test_a_sink_gets_every_record_and_the_summary(tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.records: list[dict[str, Any]] = []
            self.summary: dict[str, Any] = {}

        def write(self, record: Any) -> None:
            self.records.append(record)

        def close(self, summary: Any) -> None:
            self.summary = summary

    kept = Kept()
    train(str(tmp_path), 3, sinks=[kept])
    assert kept.records == records(tmp_path) and kept.summary["steps"] == 3


def test_tensorboard_holds_the_losses(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    model, optimizer = pair()
    with fleet.Monitor(tmp_path, show=False) as watch:
        for index in range(3):
            watch.log(optimizer.minimize(loss_of(model, index)), acc=index)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("fleetx/loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("fleetx/loss")] == pytest.approx([line["loss"] for line in records(tmp_path)])
    assert [event.value for event in events.Scalars("values/acc")] == [0, 1, 2]


def fill(file: Path) -> None:
    """Use up all the room there is."""
    with file.open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(where)], capture_output=True)
    if made.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_files, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(lasting_files, "LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("always_looks")
def test_a_full_disk_is_told_once_and_every_update_is_written_once_there_is_room(small_disk: Path) -> None:
    model, optimizer = pair()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet(small_disk / "run") as watch:
            watch.log(optimizer.minimize(loss_of(model)))
            watch.log(optimizer.minimize(loss_of(model)))
            fill(small_disk / "ballast")
            for index in range(40):
                watch.log(optimizer.minimize(loss_of(model, index)))
            assert len(records(small_disk / "run")) < 40, "whole lines, and not all"
            (small_disk / "ballast").unlink()
            watch.log(optimizer.minimize(loss_of(model)))
    assert [line["step"] for line in records(small_disk / "run")] == list(range(1, 44))
    assert summary(small_disk / "run")["steps"] == 43
    (told,) = [str(one.message) for one in caught if "cannot be written now" in str(one.message)]
    assert "No space left on device" in told


@pytest.mark.usefixtures("always_looks")
def test_a_run_may_end_on_a_full_disk(small_disk: Path) -> None:
    model, optimizer = pair()
    with pytest.warns(FleetWarning, match="cannot be written now"), quiet(small_disk / "run") as watch:
        fill(small_disk / "ballast")
        for index in range(40):
            watch.log(optimizer.minimize(loss_of(model, index)))


@pytest.mark.usefixtures("always_looks")
def test_a_run_folder_that_is_deleted_is_made_again_with_all_that_is_known(tmp_path: Path) -> None:
    model, optimizer = pair()
    with quiet(tmp_path / "run") as watch:
        for index in range(3):
            watch.log(optimizer.minimize(loss_of(model, index)))
        shutil.rmtree(tmp_path / "run")
        for index in range(3):
            watch.log(optimizer.minimize(loss_of(model, index)))
    assert [line["step"] for line in records(tmp_path / "run")] == [3, 4, 5, 6]
    assert (tmp_path / "run" / "strategy.yaml").exists() and len(environment(tmp_path / "run")["starts"]) == 1


def test_lines_that_wait_are_bounded_and_the_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lasting_files, "MOST_LINES", 10)
    files = lasting_files.LastingFiles(tmp_path / ".", "lines")
    fails = [True]

    def write(file: Any, line: bytes) -> None:
        if fails[0]:
            raise OSError(28, "No space left on device")
        file.write(line)

    monkeypatch.setattr(lasting_files, "_write_whole", write)
    with pytest.warns(FleetWarning, match="cannot be written now"):
        for number in range(25):
            files.add_line(b"%d\n" % number)
    fails[0] = False
    files.close()
    assert (tmp_path / "lines").read_text().split() == [str(number) for number in range(15, 25)]
    assert "is written again; 15 lines were lost." in capsys.readouterr().out


def test_links_in_the_run_folder_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("precious")
    names = ["environment.json", "strategy.yaml", "summary.json", "memory.json"]
    for name in [*names, *(f".{name}.part" for name in names), "workerlog.0", ".workerlog.0.part"]:
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    train(str(tmp_path / "run"), 5)
    assert (tmp_path / "victim").read_text() == "precious"
    assert all(not (tmp_path / "run" / name).is_symlink() for name in names[:3])
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="cannot be written"):
        quiet(tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "precious"


def test_other_users_cannot_read_what_is_recorded(tmp_path: Path) -> None:
    train(str(tmp_path), 3)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o007 == 0, path.name


def test_plain_lines_go_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = pair()
    capsys.readouterr()
    with fleet.Monitor(tmp_path / "run", total_steps=40, tensorboard=False) as watch:
        for index in range(40):
            watch.log(optimizer.minimize(loss_of(model, index)), samples=8)
        watch.log(acc=0.75)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("──────────── 1/40 · loss 1.") and "\x1b" not in first + last
    assert last.startswith("finished after 0:0") and "40 steps" in last and "acc 0.75" in last and str(tmp_path / "run") in last


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda folder: fleet.Monitor(""), "dir is ''; it must be the folder of the run"),
        (lambda folder: fleet.Monitor(3), "dir is 3"),
        (lambda folder: fleet.Monitor(folder, total_steps=0), "total_steps is 0; it must be the number of updates"),
        (lambda folder: fleet.Monitor(folder, total_steps=True), "total_steps is True"),
        (lambda folder: fleet.Monitor(folder, sinks=[print]), "lacks write(record) or close(summary)"),
        (lambda folder: fleet.Monitor(__file__), "cannot be written"),
    ],
)
def test_what_a_monitor_cannot_use_is_refused(tmp_path: Path, call: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(tmp_path)
    assert expected in str(caught.value)


def test_what_cannot_be_logged_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    model, optimizer = pair()
    with quiet(tmp_path) as watch:
        with pytest.raises(ConfigError, match="acc was logged before any update"):
            watch.log(acc=1.0)
        report = optimizer.minimize(loss_of(model))
        for call, expected in (
            (lambda: watch.log(torch.zeros(3)), "log\\(\\) was given Tensor"),
            (lambda: watch.log(report, acc=torch.zeros(3)), "acc is a tensor of shape \\(3,\\)"),
            (lambda: watch.log(report, acc="high"), "acc is 'high'"),
            (lambda: watch.log(report, samples=2.5), "samples is 2.5"),
            (lambda: fleet.Monitor(tmp_path / "other"), "a fleet.Monitor is open already"),
        ):
            with pytest.raises(ConfigError, match=expected):
                call()
        watch.log(report)
    with pytest.raises(ConfigError, match="is closed"):
        watch.log(report)
    assert len(records(tmp_path)) == 1
    watch.close()


def test_values_that_sound_like_secrets_are_not_written_down() -> None:
    given = ["train.py", "--api-key", "abc", "--hub_token=xyz", "+wandb.api_key=S", "HF_TOKEN=S", "--data", "https://me:S@host/x"]
    shown = ["train.py", "--api-key", "(hidden)", "--hub_token=(hidden)", "+wandb.api_key=(hidden)", "HF_TOKEN=(hidden)"]
    assert command_without_secrets(given) == [*shown, "--data", "https://me:(hidden)@host/x"]
    plain = ["--lr", "0.1", "--tokenizer", "bert", "--max-tokens=512", "--password"]
    assert command_without_secrets(plain) == plain


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("hf_AbCdEfGhIjKlMnOpQrStUvWx", "(hidden)"),
        ("--login=hf_AbCdEfGhIjKlMnOpQrStUvWx", "--login=(hidden)"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer (hidden)"),
        ("'authorization': 'Basic dXNlcjpwYXNz'", "'authorization': 'Basic (hidden)'"),
        ("sent bearer abc.def.ghi", "sent bearer (hidden)"),
        ("https://s3/x?X-Amz-Date=1&X-Amz-Signature=0f0f&y=2", "https://s3/x?X-Amz-Date=1&X-Amz-Signature=(hidden)&y=2"),
        ("https://blob/x?sv=1&sig=ab%2Fcd", "https://blob/x?sv=1&sig=(hidden)"),
        ("https://x/y?access_token=abc#top", "https://x/y?access_token=(hidden)#top"),
        ("ghp_0123456789abcdefABCD", "(hidden)"),
        ("AKIAIOSFODNN7EXAMPLE", "(hidden)"),
        ("sk-proj-0123456789abcdef", "(hidden)"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "(hidden)"),
    ],
)
def test_secrets_are_known_by_their_form(given: str, shown: str) -> None:
    assert without_secrets(given) == shown
    assert command_without_secrets(["train.py", given])[1] in (shown, shown.removesuffix("#top"))


@pytest.mark.parametrize(
    "plain",
    [
        "bert-base-uncased",
        "hf_hub",
        "sk-learn",
        "basics",
        "--basic",
        "runs/key=3",
        "a.b.c",
        "task-0123456789abcdefgh",
        "?step=3&k=4",
    ],
)
def test_what_is_no_secret_is_shown(plain: str) -> None:
    assert without_secrets(plain) == plain


def test_an_error_in_the_summary_shows_no_secret(tmp_path: Path) -> None:
    model, optimizer = pair()
    with pytest.raises(ValueError, match="hf_"), quiet(tmp_path) as watch:
        watch.log(optimizer.minimize(loss_of(model)))
        raise ValueError("401 for hf_AbCdEfGhIjKlMnOpQrStUvWx at https://me:S@host/x")
    assert summary(tmp_path)["error"] == "ValueError: 401 for (hidden) at https://me:(hidden)@host/x"


def test_the_worker_log_is_linked_while_it_grows_and_kept_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log" / "workerlog.0"
    log.parent.mkdir()
    log.write_text("first\n")
    monkeypatch.setenv("FLEETX_WORKER_LOG", str(log))
    with quiet(tmp_path / "run"):
        assert os.readlink(tmp_path / "run" / "workerlog.0") == str(log)
        with log.open("a") as file:
            file.write("second\n")
    log.write_text("")  # the next run begins
    assert (tmp_path / "run" / "workerlog.0").read_text() == "first\nsecond\n"


def test_a_log_that_lies_in_the_run_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "workerlog.0"
    log.write_text("all\n")
    monkeypatch.setenv("FLEETX_WORKER_LOG", str(log))
    with quiet(tmp_path):
        pass
    assert log.read_text() == "all\n" and not log.is_symlink()


def test_a_thread_other_than_the_main_one_may_train(tmp_path: Path) -> None:
    import threading

    worker = threading.Thread(target=train, args=(str(tmp_path), 3))
    worker.start()
    worker.join()
    heartbeat.record.thread = threading.main_thread().ident
    assert all(line["split"]["backward"] > 0 for line in records(tmp_path))


def test_a_launcher_can_tell_every_phase() -> None:
    from fleetx.launch.hang import PLACES

    assert set(PLACES) == set(Phase)


def test_values_of_a_merge_window_join_its_own_update(tmp_path: Path) -> None:
    model, optimizer = pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    with quiet(tmp_path) as watch:
        for index in range(4):
            watch.log(optimizer.minimize(loss_of(model, index)), **{f"value{index}": index})
    assert [line["values"] for line in records(tmp_path)] == [{"value0": 0, "value1": 1}, {"value2": 2, "value3": 3}]


def test_a_sink_that_fails_is_told_of_and_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken:
        calls = 0

        def write(self, record: Any) -> None:
            self.calls += 1
            raise OSError("the server is gone")

        def close(self, summary: Any) -> None:
            raise AssertionError("it was left out")

    broken = Broken()
    model, optimizer = pair()
    with (
        pytest.warns(FleetWarning, match=r"sink Broken failed \(OSError: the server is gone\)"),
        quiet(tmp_path, sinks=[broken]) as watch,
    ):
        for index in range(3):
            watch.log(optimizer.minimize(loss_of(model, index)))
    assert broken.calls == 1 and len(records(tmp_path)) == 3 and summary(tmp_path)["state"] == "finished"


def test_how_a_run_ended_is_written_also_where_its_last_numbers_cannot_be_read(tmp_path: Path) -> None:
    model, optimizer = pair()
    with pytest.raises(RuntimeError, match="the device is gone"), quiet(tmp_path) as watch:
        watch.log(optimizer.minimize(loss_of(model)))
        watch._pending[-1].split = _Gone()
    assert summary(tmp_path)["state"] == "finished" and monitors._open is None


class _Gone:
    is_ready = False

    def value(self) -> Any:
        raise RuntimeError("the device is gone")


def test_of_two_pairs_the_first_is_shown_and_the_bytes_of_both_are_summed(tmp_path: Path) -> None:
    (first, one), (second, other) = pair(), pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    with quiet(tmp_path, total_steps=6) as watch:
        for index in range(6):
            report = one.minimize(loss_of(first, index))
            watch.log(report, samples=8)
            watch.log(other.minimize(loss_of(second, index)), samples=8)
    lines, ended = records(tmp_path), summary(tmp_path)
    assert [line["step"] for line in lines if line["pair"] == 2] == [1, 2, 3]
    assert {line["samples"] for line in lines if line["pair"] == 2} == {16}
    assert (ended["steps"], ended["loss"], ended["samples"]) == (6, report.loss, 96)
    seconds = ended["samples"] / ended["samples_per_second"]
    assert ended["steps_per_second"] == pytest.approx(6 / seconds)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_stays_whole_under_a_monitor(tmp_path: Path) -> None:
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(list(graph.graph.nodes)))
        return graph.forward

    model = mlp()
    model.compile(backend=backend, fullgraph=True)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    with quiet(tmp_path) as watch:
        for index in range(3):
            watch.log(optimizer.minimize(loss_of(model, index)))
    assert len(seen) == 1 and len(records(tmp_path)) == 3


def test_a_rerun_with_fewer_pairs_leaves_no_strategy_of_the_old_ones(tmp_path: Path) -> None:
    first, second = pair(), pair()
    with quiet(tmp_path):
        assert (tmp_path / "strategy.2.yaml").exists()
    del second
    registry.forget()
    again = pair()
    with quiet(tmp_path):
        assert not (tmp_path / "strategy.2.yaml").exists() and (tmp_path / "strategy.yaml").exists()
    del first, again


def test_the_log_of_the_start_before_is_kept_beside_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("first\n")
    monkeypatch.setenv("FLEETX_WORKER_LOG", str(log))
    with quiet(tmp_path / "run"):
        pass
    log.write_text("second\n")
    with quiet(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "workerlog.0.previous").read_text() == "first\n"
    assert (tmp_path / "run" / "workerlog.0").read_text() == "second\n"


@pytest.mark.parametrize(("columns", "told", "expected"), [(100, "70", 100), (0, "70", 70), (0, "", 80), (0, "0", 80)])
def test_a_terminal_that_does_not_know_its_width_gets_one(
    columns: int, told: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl
    import pty
    import struct
    import termios

    from fleetx.config.terminal import columns_of

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    monkeypatch.setenv("COLUMNS", told)
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal:
        assert columns_of(terminal) == expected


class Ticking:
    """An event of a device that does one thing a millisecond."""

    ticks = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None: ...

    def record(self) -> None:
        Ticking.ticks += 1
        self.at = Ticking.ticks

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Ticking) -> float:
        return later.at - self.at


def test_events_of_a_worker_that_does_not_log_become_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Ticking)
    watch = DeviceStopwatch(Phase.SCRIPT, torch.device("cuda"))
    for index in range(3 * MOST_EVENTS):
        watch.changed(Phase.FORWARD if index % 3 else Phase.BACKWARD)
    assert len(watch._marks) < MOST_EVENTS
    split = watch.take().value()
    assert split["forward"] == pytest.approx(2 * split["backward"])
    assert sum(split.values()) == pytest.approx((3 * MOST_EVENTS + 1) / 1e3)
    assert sum(watch.take().value().values()) == pytest.approx(1e-3)

"""Sinks for Weights & Biases and MLflow with the real packages, offline: what a run logs can be read back."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import warnings
from pathlib import Path

import pytest
import torch

from fleetx import fleet
from fleetx.errors import ConfigError
from fleetx.monitor import MLflow, Sink, WeightsAndBiases
from tests.helpers.harness import run_ranks


def train(folder: str, sink: Sink, updates: int = 3) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    with fleet.Monitor(folder, sinks=[sink], tensorboard=False, show=False) as monitor:
        for update in range(updates):
            report = optimizer.minimize(model(torch.ones(3, 4)).square().mean())
            monitor.log(report, samples=3, accuracy=0.25 * update)
            losses.append(float(report.loss or 0.0))
    return losses


def to_mlflow(rank: int, folder: str) -> list[float]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer ones would rather have a database
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return train(folder, MLflow("digits", tracking_uri=f"file:{folder}/mlruns", run_name="first"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_every_update_and_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    [losses] = run_ranks(to_mlflow, 1, str(tmp_path))
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/mlruns")
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    history = client.get_metric_history(run.info.run_id, "fleetx/loss")
    assert [(point.step, point.value) for point in history] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses, 1)
    ]
    assert [point.value for point in client.get_metric_history(run.info.run_id, "values/accuracy")] == [0.0, 0.25, 0.5]
    assert run.data.metrics["summary/steps"] == 3 and run.data.metrics["summary/samples"] == 9


def to_wandb(rank: int, folder: str) -> list[float]:
    os.environ["WANDB_SILENT"] = "true"
    return train(folder, WeightsAndBiases("digits", mode="offline", dir=folder, name="first"))


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_holds_every_update_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    [losses] = run_ranks(to_wandb, 1, str(tmp_path))
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = wandb_history(file)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["fleetx/loss"] for row in rows] == pytest.approx(losses)
    assert [row["values/accuracy"] for row in rows] == [0.0, 0.25, 0.5]


HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15
WHOLE, LAST = 1, 4
"""Kinds of pieces: a record in one, and the last of several."""


def wandb_history(file: Path) -> list[dict[str, float]]:
    """Read an offline run: a log of records in blocks, each piece with a checksum, its length and its kind before it."""
    from wandb.proto import wandb_internal_pb2

    data, place, record, rows = file.read_bytes(), HEADER_BYTES, b"", []
    while place + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - place % BLOCK_BYTES < HEADER_BYTES:
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEADER_BYTES])
        record += data[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        if kind not in (WHOLE, LAST):
            continue
        parsed, record = wandb_internal_pb2.Record.FromString(record), b""
        if parsed.HasField("history"):
            items = parsed.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.parametrize("sink", [MLflow, WeightsAndBiases])
def test_a_package_that_is_missing_is_one_sentence(sink: type[Sink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'it is not installed. Write: pip install "fleetx\[(mlflow|wandb)\]"'):
        sink()

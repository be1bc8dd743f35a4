"""Send a run's records to MLflow: `fleet.Monitor(dir, sinks=[MLflow(experiment="digits")])`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, final

from ..errors import ConfigError
from .sinks import scalars_of, summary_scalars

INSTALL = 'it is not installed. Write: pip install "fleetx[mlflow]"'
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@final
class MLflow:
    """A sink that logs every update to one run of MLflow.

    The run is opened at the first record, on worker 0 alone, so that every worker may make the sink. Where the script has a run
    active already, records go there, and the run is left active.

    Examples:
        >>> from fleetx.monitor import MLflow
        >>> monitor = fleet.Monitor("runs/first", sinks=[MLflow(experiment="digits", tracking_uri="file:mlruns")])
    """

    def __init__(self, experiment: str | None = None, *, tracking_uri: str | None = None, run_name: str | None = None) -> None:
        """Log under an experiment and a run name of MLflow (None: its own choice), to a server or a folder ("file:mlruns");
        `tracking_uri` None: as MLFLOW_TRACKING_URI says."""
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError(f"MLflow: {INSTALL}")
        self._experiment, self._tracking_uri, self._run_name = experiment, tracking_uri, run_name
        self._client: Any = None
        self._run_id = ""
        self._is_ours = False
        self._begun_ms = self._last_ms = 0
        """Times of the run's beginning and of the last record after it, in milliseconds."""

    def write(self, record: Mapping[str, Any]) -> None:
        self._log(scalars_of(record), step=int(record["step"]), milliseconds=int(1000 * record["seconds"]))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._log({f"summary/{name}": value for name, value in summary_scalars(summary).items()}, step=int(summary["steps"]))
        if self._is_ours:
            self._client.set_terminated(self._run_id, STATES.get(str(summary["state"]), "FAILED"))

    def _log(self, scalars: Mapping[str, float], *, step: int, milliseconds: int | None = None) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self._open()
        at = self._begun_ms + (self._last_ms if milliseconds is None else milliseconds)
        self._last_ms = at - self._begun_ms
        metrics = [Metric(name, value, at, step) for name, value in scalars.items() if math.isfinite(value)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _open(self) -> None:
        import mlflow  # late: it is an extra, and takes seconds

        active = mlflow.active_run() if self._tracking_uri is None else None
        self._client, self._is_ours = mlflow.MlflowClient(tracking_uri=self._tracking_uri), active is None
        if active is None:
            active = self._client.create_run(self._experiment_id(), run_name=self._run_name)
        self._run_id, self._begun_ms, self._last_ms = active.info.run_id, int(active.info.start_time), 0

    def _experiment_id(self) -> str:
        name = self._experiment or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

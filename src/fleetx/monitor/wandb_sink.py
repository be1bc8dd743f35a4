"""Send a run's records to Weights & Biases: `fleet.Monitor(dir, sinks=[WeightsAndBiases(project="digits")])`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, final

from ..errors import ConfigError
from .sinks import scalars_of, summary_scalars

INSTALL = 'it is not installed. Write: pip install "fleetx[wandb]"'


@final
class WeightsAndBiases:
    """A sink that logs every update to one run of Weights & Biases.

    The run is opened at the first record, on worker 0 alone, so that every worker may make the sink. Where the script has a run
    open already, records go there, and the run is left open.

    Examples:
        >>> from fleetx.monitor import WeightsAndBiases
        >>> monitor = fleet.Monitor("runs/first", sinks=[WeightsAndBiases(project="digits", mode="offline")])
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        """Log to a project. `options`: those of `wandb.init`, such as name, group, dir and mode ("offline": no account)."""
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"WeightsAndBiases: {INSTALL}")
        self._options = {"project": project, **options}
        self._run: Any = None
        self._is_ours = False

    def write(self, record: Mapping[str, Any]) -> None:
        self._opened().log(scalars_of(record), step=int(record["step"]))

    def close(self, summary: Mapping[str, Any]) -> None:
        run = self._opened()
        run.summary.update(summary_scalars(summary))
        if self._is_ours:
            run.finish(exit_code=0 if summary["state"] == "finished" else 1)

    def _opened(self) -> Any:
        if self._run is None:
            import wandb  # late: it is an extra, and takes a second

            self._is_ours = wandb.run is None
            self._run = wandb.init(**self._options) if self._is_ours else wandb.run
        return self._run

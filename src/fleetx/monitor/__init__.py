"""Show a running job in one live line, and record it in a run folder and in the tracker you use."""

from .mlflow_sink import MLflow
from .monitor import Monitor
from .sinks import Sink
from .wandb_sink import WeightsAndBiases

__all__ = ["MLflow", "Monitor", "Sink", "WeightsAndBiases"]

"""Show a running job in one live line, and record it in a run folder."""

from .monitor import Monitor
from .sinks import Sink

__all__ = ["Monitor", "Sink"]

"""A running job, seen from outside: one live line, and a folder that tells of the run afterwards."""

from .monitor import Monitor
from .sinks import Sink

__all__ = ["Monitor", "Sink"]

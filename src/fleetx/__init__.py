"""FleetX for PyTorch: large-batch and low-bandwidth training strategies that compose."""

from . import errors, fleet
from .strategy import DistributedStrategy

__version__ = "0.1.0"
__all__ = ["DistributedStrategy", "__version__", "errors", "fleet"]

"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from .errors import CheckpointError, CheckpointWarning
from .formats import detect, load, save
from .state import CheckpointState, OptimizerGroup, PartitionInfo

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointState",
    "CheckpointWarning",
    "OptimizerGroup",
    "PartitionInfo",
    "detect",
    "load",
    "save",
]

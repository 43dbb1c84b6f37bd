"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from .bridge import from_torch, to_optimizer_state_dict, to_state_dict
from .errors import CheckpointError, CheckpointWarning
from .formats import detect, load, save
from .names import NameMap
from .state import CheckpointState, OptimizerGroup, PartitionInfo

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointState",
    "CheckpointWarning",
    "NameMap",
    "OptimizerGroup",
    "PartitionInfo",
    "detect",
    "from_torch",
    "load",
    "save",
    "to_optimizer_state_dict",
    "to_state_dict",
]

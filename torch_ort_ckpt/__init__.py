"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from .averaging import average
from .bridge import from_torch, to_optimizer_state_dict, to_state_dict
from .comparison import Report, diff
from .conversion import convert
from .errors import CheckpointError, CheckpointWarning
from .formats import detect, load, merge, save
from .integrity import verify
from .names import NameMap
from .partition import PartitionPlan, split
from .state import CheckpointState, OptimizerGroup, PartitionInfo

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointState",
    "CheckpointWarning",
    "NameMap",
    "OptimizerGroup",
    "PartitionInfo",
    "PartitionPlan",
    "Report",
    "average",
    "convert",
    "detect",
    "diff",
    "from_torch",
    "load",
    "merge",
    "save",
    "split",
    "to_optimizer_state_dict",
    "to_state_dict",
    "verify",
]

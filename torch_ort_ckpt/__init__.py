"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .artifacts import Artifacts, OptimizerSpec
    from .engines.torch import register_op
    from .export import export_artifacts
    from .runtime.module import OrtModule
    from .runtime.optimizer import OrtOptimizer
    from .runtime.session import TrainingSession
    from .source import to_torch_module
    from .stages import pipeline_stages
    from .training.config import RunnerConfig
    from .training.manager import CheckpointManager
    from .training.runner import TrainingRunner
    from .training.schedule import LearningRate, optimal_checkpoint_period

__version__ = "0.1.0"

_LAZY = {
    "Artifacts": ".artifacts",
    "OptimizerSpec": ".artifacts",
    "OrtModule": ".runtime.module",
    "OrtOptimizer": ".runtime.optimizer",
    "CheckpointManager": ".training.manager",
    "LearningRate": ".training.schedule",
    "RunnerConfig": ".training.config",
    "TrainingRunner": ".training.runner",
    "optimal_checkpoint_period": ".training.schedule",
    "TrainingSession": ".runtime.session",
    "export_artifacts": ".export",
    "pipeline_stages": ".stages",
    "register_op": ".engines.torch",
    "to_torch_module": ".source",
}
"""Names that cost an import (onnx, engines) and are looked up when first used."""

__all__ = [
    "Artifacts",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointState",
    "CheckpointWarning",
    "LearningRate",
    "NameMap",
    "OptimizerGroup",
    "OptimizerSpec",
    "OrtModule",
    "OrtOptimizer",
    "PartitionInfo",
    "PartitionPlan",
    "Report",
    "RunnerConfig",
    "TrainingRunner",
    "TrainingSession",
    "average",
    "convert",
    "detect",
    "diff",
    "export_artifacts",
    "from_torch",
    "load",
    "merge",
    "optimal_checkpoint_period",
    "pipeline_stages",
    "register_op",
    "save",
    "split",
    "to_optimizer_state_dict",
    "to_state_dict",
    "to_torch_module",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

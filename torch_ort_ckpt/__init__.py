"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from typing import TYPE_CHECKING, Any

from .checkpoint.bridge import from_torch, to_optimizer_state_dict, to_state_dict
from .checkpoint.names import NameMap
from .checkpoint.partition import PartitionPlan, split
from .checkpoint.state import CheckpointState, OptimizerGroup, PartitionInfo
from .errors import CheckpointError, CheckpointWarning, CorruptFileError
from .formats import detect, load, merge, save
from .operations.average import average
from .operations.convert import convert
from .operations.diff import DiffReport, diff
from .operations.summarize import summarize
from .operations.verify import Verification, verify

if TYPE_CHECKING:
    from .graphs.artifacts import Artifacts, OptimizerSpec
    from .graphs.export import export_artifacts
    from .graphs.source.module import to_torch_module
    from .graphs.translation import register_op
    from .runtime.module import OrtModule
    from .runtime.optimizer import OrtOptimizer
    from .runtime.session import TrainingSession
    from .runtime.stages import pipeline_stages
    from .training.config import RunnerConfig
    from .training.entry import Entry
    from .training.feed import Feed
    from .training.manager import CheckpointManager
    from .training.runner import Result, TrainingRunner
    from .training.sampler import ResumableSampler
    from .training.schedule import LearningRate, optimal_checkpoint_period

__version__ = "0.1.0"

_LAZY = {
    "Artifacts": ".graphs.artifacts",
    "OptimizerSpec": ".graphs.artifacts",
    "OrtModule": ".runtime.module",
    "OrtOptimizer": ".runtime.optimizer",
    "CheckpointManager": ".training.manager",
    "Entry": ".training.entry",
    "Feed": ".training.feed",
    "LearningRate": ".training.schedule",
    "ResumableSampler": ".training.sampler",
    "Result": ".training.runner",
    "RunnerConfig": ".training.config",
    "TrainingRunner": ".training.runner",
    "optimal_checkpoint_period": ".training.schedule",
    "TrainingSession": ".runtime.session",
    "export_artifacts": ".graphs.export",
    "pipeline_stages": ".runtime.stages",
    "register_op": ".graphs.translation",
    "to_torch_module": ".graphs.source.module",
}
"""Names that cost an import (onnx, engines) and are looked up when first used."""

_RENAMED = {"Report": "DiffReport"}
"""Old names that keep working, with a DeprecationWarning."""

__all__ = [
    "Artifacts",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointState",
    "CheckpointWarning",
    "CorruptFileError",
    "DiffReport",
    "Entry",
    "Feed",
    "LearningRate",
    "NameMap",
    "OptimizerGroup",
    "OptimizerSpec",
    "OrtModule",
    "OrtOptimizer",
    "PartitionInfo",
    "PartitionPlan",
    "Result",
    "ResumableSampler",
    "RunnerConfig",
    "TrainingRunner",
    "TrainingSession",
    "Verification",
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
    "summarize",
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
    if name in _RENAMED:
        import warnings

        warnings.warn(f"{__name__}.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

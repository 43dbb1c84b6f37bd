"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit.

Files         load, save, detect, convert, verify, summarize; merge, split and PartitionPlan for rank sets
States        CheckpointState of OptimizerGroup and PartitionInfo; average, diff -> DiffReport, Verification
PyTorch       to_state_dict, to_optimizer_state_dict, from_torch, NameMap
Graphs        Artifacts, OptimizerSpec, export_artifacts, export_step_model, export_executorch,
              rebuild_artifacts, to_torch_module, pipeline_stages, register_op, register_decomposition
Running them  OrtModule, OrtOptimizer, TrainingSession
Training      TrainingRunner with RunnerConfig and LearningRate -> Result; CheckpointManager of Entry; Feed,
              ResumableSampler, optimal_checkpoint_period
Metrics       MetricsLogger: CSVLogger, JSONLinesLogger, MLflowLogger, WandbLogger
Problems      CheckpointError, CorruptFileError, CheckpointWarning

`save` replaces an existing file, as torch.save does; everything else does so only with overwrite=True.
torch_ort_ckpt.lightning has OrtCheckpointIO and OrtCheckpoint. The command line is torch-ort-ckpt.
Importing the package imports neither torch nor onnx: public names are imported when first used.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, CheckpointWarning, CorruptFileError

if TYPE_CHECKING:  # the same names, for type checkers and the documentation
    from .checkpoint.bridge import from_torch, to_optimizer_state_dict, to_state_dict
    from .checkpoint.names import NameMap
    from .checkpoint.partition import PartitionPlan, split
    from .checkpoint.state import CheckpointState, OptimizerGroup, OptimizerSpec, PartitionInfo
    from .formats import detect, load, merge, save
    from .graphs.artifacts import Artifacts
    from .graphs.export import export_artifacts
    from .graphs.gradients.decompositions import register_decomposition
    from .graphs.rebuild import rebuild_artifacts
    from .graphs.source.module import to_torch_module
    from .graphs.standard.export import export_step_model
    from .graphs.translation import register_op
    from .integrations.executorch import export_executorch
    from .operations.average import average
    from .operations.convert import convert
    from .operations.diff import DiffReport, diff
    from .operations.summarize import summarize
    from .operations.verify import Verification, verify
    from .runtime.module import OrtModule
    from .runtime.optimizer import OrtOptimizer
    from .runtime.session import TrainingSession
    from .runtime.stages import pipeline_stages
    from .training.config import RunnerConfig
    from .training.entry import Entry
    from .training.feed import Feed
    from .training.loggers import CSVLogger, JSONLinesLogger, MetricsLogger, MLflowLogger, WandbLogger
    from .training.manager import CheckpointManager
    from .training.runner import Result, TrainingRunner
    from .training.sampler import ResumableSampler
    from .training.schedule import LearningRate, optimal_checkpoint_period

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application decides what is shown

_LAZY = {
    "Artifacts": ".graphs.artifacts",
    "CSVLogger": ".training.loggers",
    "CheckpointManager": ".training.manager",
    "CheckpointState": ".checkpoint.state",
    "DiffReport": ".operations.diff",
    "Entry": ".training.entry",
    "Feed": ".training.feed",
    "JSONLinesLogger": ".training.loggers",
    "LearningRate": ".training.schedule",
    "MLflowLogger": ".training.loggers",
    "MetricsLogger": ".training.loggers",
    "NameMap": ".checkpoint.names",
    "OptimizerGroup": ".checkpoint.state",
    "OptimizerSpec": ".checkpoint.state",
    "OrtModule": ".runtime.module",
    "OrtOptimizer": ".runtime.optimizer",
    "PartitionInfo": ".checkpoint.state",
    "PartitionPlan": ".checkpoint.partition",
    "Result": ".training.runner",
    "ResumableSampler": ".training.sampler",
    "RunnerConfig": ".training.config",
    "TrainingRunner": ".training.runner",
    "TrainingSession": ".runtime.session",
    "Verification": ".operations.verify",
    "WandbLogger": ".training.loggers",
    "average": ".operations.average",
    "convert": ".operations.convert",
    "detect": ".formats",
    "diff": ".operations.diff",
    "export_artifacts": ".graphs.export",
    "export_executorch": ".integrations.executorch",
    "export_step_model": ".graphs.standard.export",
    "rebuild_artifacts": ".graphs.rebuild",
    "from_torch": ".checkpoint.bridge",
    "load": ".formats",
    "merge": ".formats",
    "optimal_checkpoint_period": ".training.schedule",
    "pipeline_stages": ".runtime.stages",
    "register_decomposition": ".graphs.gradients.decompositions",
    "register_op": ".graphs.translation",
    "save": ".formats",
    "split": ".checkpoint.partition",
    "summarize": ".operations.summarize",
    "to_optimizer_state_dict": ".checkpoint.bridge",
    "to_state_dict": ".checkpoint.bridge",
    "to_torch_module": ".graphs.source.module",
    "verify": ".operations.verify",
}
"""Where each public name is defined. The module is imported when the name is first used."""

_SUBMODULES = ("checkpoint", "dtypes", "formats", "operations", "storage")
"""Imported when first used as an attribute, so that `torch_ort_ckpt.formats` needs no import of its own."""

_RENAMED = {"Report": "DiffReport"}
"""Old names that keep working, with a DeprecationWarning."""

__all__ = [
    "Artifacts",
    "CSVLogger",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointState",
    "CheckpointWarning",
    "CorruptFileError",
    "DiffReport",
    "Entry",
    "Feed",
    "JSONLinesLogger",
    "LearningRate",
    "MLflowLogger",
    "MetricsLogger",
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
    "WandbLogger",
    "average",
    "convert",
    "detect",
    "diff",
    "export_artifacts",
    "export_executorch",
    "export_step_model",
    "from_torch",
    "load",
    "merge",
    "optimal_checkpoint_period",
    "pipeline_stages",
    "rebuild_artifacts",
    "register_decomposition",
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
        value = getattr(import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    if name in _RENAMED:
        import warnings

        warnings.warn(f"{__name__}.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})

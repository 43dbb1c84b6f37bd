"""ONNX Runtime training checkpoints and graphs in PyTorch, and back, bit for bit."""

from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, CheckpointWarning
from .formats import detect, load, save
from .state import CheckpointState, OptimizerGroup, PartitionInfo

if TYPE_CHECKING:
    from .artifacts import Artifacts, OptimizerSpec
    from .engines.torch import register_op
    from .export import export_artifacts
    from .runtime.module import OrtModule
    from .runtime.optimizer import OrtOptimizer
    from .source import to_torch_module
    from .stages import pipeline_stages

__version__ = "0.1.0"

_LAZY = {
    "Artifacts": ".artifacts",
    "OptimizerSpec": ".artifacts",
    "OrtModule": ".runtime.module",
    "OrtOptimizer": ".runtime.optimizer",
    "export_artifacts": ".export",
    "pipeline_stages": ".stages",
    "register_op": ".engines.torch",
    "to_torch_module": ".source",
}
"""Names that cost an import (onnx, engines) and are looked up when first used."""

__all__ = [
    "Artifacts",
    "CheckpointError",
    "CheckpointState",
    "CheckpointWarning",
    "OptimizerGroup",
    "OptimizerSpec",
    "OrtModule",
    "OrtOptimizer",
    "PartitionInfo",
    "detect",
    "export_artifacts",
    "load",
    "pipeline_stages",
    "register_op",
    "save",
    "to_torch_module",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The package onnxruntime: importing it, and the exceptions it raises."""

from __future__ import annotations

from typing import Any

from ..errors import MissingDependencyError


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"ONNX Runtime can't be imported ({error})",
            remedy='pip install "torch-ort-ckpt[ort]", or use engine="torch". `torch-ort-ckpt doctor` shows what works here.',
        ) from error
    return onnxruntime


def ort_errors() -> tuple[type[Exception], ...]:
    """ORT's exceptions have no common base class but `Exception`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoaded", "NoModel", "NoSuchFile")
    own = [getattr(state, name) for name in (*names, "NotImplemented", "RuntimeException") if hasattr(state, name)]
    return (RuntimeError, ValueError, *own)

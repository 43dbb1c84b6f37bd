"""ONNX Runtime's CUDA provider: how its sessions are set up, and how a run is told not to wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import MissingDependencyError, UnsupportedError
from .devices import PROVIDER

_PINNED = 1
"""OrtDevice's number for pinned CPU memory, which Python has no name for."""
SYNCHRONISED = 256
"""Every so many runs of a session one waits at its end. ONNX Runtime frees pinned staging buffers (of Concat, Split, batched MatMul,
ScatterND and cuDNN's recurrent layers) only then: otherwise they grow with every run."""
_OURS = {
    "device_id": "use device=",
    "user_compute_stream": "the engine's stream is ordered with PyTorch's, another one would not be",
    "has_user_compute_stream": "the engine's stream is ordered with PyTorch's, another one would not be",
    "gpu_external_alloc": "ONNX Runtime refuses an allocator together with a stream",
    "gpu_external_free": "ONNX Runtime refuses an allocator together with a stream",
    "gpu_external_empty_cache": "ONNX Runtime refuses an allocator together with a stream",
    "enable_cuda_graph": "a captured graph would read the inputs of the run that was captured",
}
"""Options that a user can't choose, and why."""


def provider_options(device: torch.device, stream: int, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Options of the CUDA provider; those that the user has chosen win.

    - `user_compute_stream`: never 0, which means "none" (see `streams`).
    - `arena_extend_strategy`: ONNX Runtime's arena grows by powers of two by default, next to PyTorch's cache of the same memory.
    - `use_tf32`: on by default in ONNX Runtime, but off for PyTorch's matrix products. Read once, when the session is made.
    """
    for name in chosen:
        if name in _OURS:
            raise UnsupportedError("can't be chosen among the provider options", field=name, remedy=f"Leave it out: {_OURS[name]}.")
    options = {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": str(int(allows_tf32())),
    }
    return options | {key: str(value) for key, value in chosen.items()}


def allows_tf32() -> bool:
    """Whether PyTorch may round to TF32, in matrix products and in convolutions: ONNX Runtime has one switch for both."""
    return _tf32(torch.backends.cuda.matmul) and _tf32(torch.backends.cudnn)


def _tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # PyTorch 2.9 and later refuse the older name when the newer one was used to set it
        return bool(backend.fp32_precision == "tf32")


def loaded(session_providers: list[str]) -> None:
    """ORT falls back to the CPU when the provider's libraries can't be loaded, and only logs it: that is an error here."""
    if PROVIDER not in session_providers:
        raise MissingDependencyError(
            "ONNX Runtime could not load its CUDA provider",
            remedy="Its CUDA and cuDNN libraries must match the build: `torch-ort-ckpt doctor` names the missing one.",
        )


class Runs:
    """The options of one session's runs: without the wait that ORT adds at the end of each, but for one in `SYNCHRONISED`. Each session
    counts its own: of two that take turns on one stream, the same one would always get the wait."""

    def __init__(self, onnxruntime: Any) -> None:
        self._without_wait = onnxruntime.RunOptions()
        self._without_wait.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._count = 0

    def options(self) -> Any:
        """Call for each run, in order (inside `Lane.ordered`)."""
        self._count += 1
        return self._without_wait if self._count % SYNCHRONISED else None


def flag_device() -> Any:
    """Where CUDA kernels put flags for the host (whether an update or an accumulation took place): pinned CPU memory. An output bound to
    plain CPU memory is copied there, and the copy waits for the stream."""
    from onnxruntime.capi import _pybind_state as ort

    return ort.OrtDevice(ort.OrtDevice.cpu(), _PINNED, 0)

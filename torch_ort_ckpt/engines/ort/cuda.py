"""Everything that differs on CUDA: the provider's options, streams, and no synchronization inside a step.

Written from the documentation of ONNX Runtime 1.19 and PyTorch; exercised only where a GPU is present (tests marked `cuda`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import CheckpointError, MissingDependencyError

PROVIDER = "CUDAExecutionProvider"


def present(device: torch.device) -> torch.device:
    """The device with its index, after checking that PyTorch has it."""
    _available(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise CheckpointError(f"device cuda:{index} does not exist", remedy=f"There are {torch.cuda.device_count()}, counted from 0.")
    return torch.device("cuda", index)


def check(device: torch.device, providers: list[str]) -> torch.device:
    """The device with its index, after checking that PyTorch and ONNX Runtime both have it."""
    _available(device)
    if PROVIDER not in providers:
        raise MissingDependencyError(
            f"device {device}: this build of onnxruntime has no CUDA provider (it has {', '.join(providers)})",
            remedy='pip install "torch-ort-ckpt[cuda]" in place of this one, or use engine="torch" (`torch-ort-ckpt doctor`).',
        )
    return present(device)


def _available(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise CheckpointError(
            f"device {device}: PyTorch finds no CUDA device",
            remedy='Use device="cpu", or install the CUDA build of torch and its driver (`torch-ort-ckpt doctor`).',
        )


def provider_options(device: torch.device, stream: int, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Options of the CUDA provider: the device, and PyTorch's stream so that ORT's work is queued after PyTorch's without a sync."""
    options = {"device_id": str(device.index or 0), "user_compute_stream": str(stream), "cudnn_conv_algo_search": "HEURISTIC"}
    return options | {key: str(value) for key, value in chosen.items()}


def loaded(session_providers: list[str]) -> None:
    """ORT falls back to the CPU when the provider's libraries can't be loaded, and only logs it: that is an error here."""
    if PROVIDER not in session_providers:
        raise MissingDependencyError(
            "ONNX Runtime could not load its CUDA provider",
            remedy="Its CUDA and cuDNN libraries must match the build: `torch-ort-ckpt doctor` names the missing one.",
        )


def run_options(onnxruntime: Any) -> Any:
    """Run without the synchronisation that ORT adds at the end of each run."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


@contextlib.contextmanager
def ordered(stream: torch.cuda.Stream) -> Iterator[None]:
    """Order a run on `stream` after PyTorch's current stream and before what follows there, without blocking the host."""
    now = torch.cuda.current_stream(stream.device)
    if now.cuda_stream == stream.cuda_stream:
        yield
        return
    stream.wait_stream(now)
    yield
    now.wait_stream(stream)

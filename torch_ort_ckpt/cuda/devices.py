"""Which GPU: checked and fixed when a module is made, and the current one left as it was."""

from __future__ import annotations

import torch
import torch.distributed

from ..errors import CheckpointError, MissingDependencyError

PROVIDER = "CUDAExecutionProvider"


def present(device: torch.device) -> torch.device:
    """The device with its index, after checking that PyTorch has it.

    The index is fixed here: "cuda" means the current device, which may be another one when the module is used.
    """
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


def random_states() -> list[torch.Tensor]:
    """The state of every GPU's random generator; none without GPUs."""
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def set_random_states(states: list[torch.Tensor], moved: tuple[int, int] | None = None) -> None:
    """Restore the generators, where the GPUs exist. `moved` is the index of the GPU that the run was on and of the one that it is on now,
    which continues with that one's state: which index a job gets is chance."""
    if not states or not torch.cuda.is_available():
        return
    chosen = {index: state for index, state in enumerate(states) if index < torch.cuda.device_count()}
    if moved is not None and moved[0] < len(states):
        chosen[moved[1]] = states[moved[0]]
    for index, state in chosen.items():
        torch.cuda.set_rng_state(state.clone(), index)


def process_group_backend() -> str:
    """gloo for CPU tensors and NCCL for CUDA ones, so that a model on the CPU of a machine with GPUs trains too. Not every build with
    CUDA has NCCL (none on Windows): gloo serves both there."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"


def _available(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise CheckpointError(
            f"device {device}: PyTorch finds no CUDA device",
            remedy='Use device="cpu", or install the CUDA build of torch and its driver (`torch-ort-ckpt doctor`).',
        )

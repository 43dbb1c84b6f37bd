"""The oracle: ONNX Runtime's own training API on the same artifacts, with one thread so that every bit is comparable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_ort_ckpt as toc
from tests.truth import DATA


def artifact_folders() -> list[str]:
    """Fixtures with a training model whose checkpoint this library can read."""
    names = sorted(place.parent.name for place in DATA.glob("*/training_model.onnx"))
    return [name for name in names if toc_reads(DATA / name / "checkpoint")]


def toc_reads(path: Path) -> bool:
    try:
        toc.detect(path)
    except toc.CheckpointError:
        return False
    return True


def loads_officially(artifacts: Any) -> bool:
    """ORT's Python loader refuses half precision (which its own artifacts may hold), and can't train on nominal values."""
    half = (torch.float16, torch.bfloat16)
    return not artifacts.state.nominal and all(value.dtype not in half for value in artifacts.state.parameters.values())


class Official:
    """`onnxruntime.training.api` with the verbs of a training loop."""

    def __init__(self, artifacts: Any, folder: Path, *, state: Any = None, optimizer: bool = True, threads: int = 1) -> None:
        import onnxruntime
        from onnxruntime.training import api

        path = folder / "official_checkpoint"
        toc.save(state if state is not None else artifacts.state, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.state = api.CheckpointState.load_checkpoint(str(path))
        evaluation = str(artifacts.eval_path) if artifacts.eval_path else None
        self.module = api.Module(str(artifacts.training_path), self.state, evaluation, "cpu", options)
        self.optimizer = api.Optimizer(str(artifacts.optimizer_path), self.module) if optimizer and artifacts.optimizer_path else None

    def loss(self, *inputs: torch.Tensor) -> Any:
        self.module.train()
        return self.module(*(value.numpy() for value in inputs))

    def evaluate(self, *inputs: torch.Tensor) -> Any:
        self.module.eval()
        return self.module(*(value.numpy() for value in inputs))

    def step(self, *inputs: torch.Tensor) -> Any:
        assert self.optimizer is not None
        loss = self.loss(*inputs)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return loss

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in self.state.parameters:
            if parameter.requires_grad:
                yield name, np.asarray(parameter.grad)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in self.state.parameters:
            yield name, np.asarray(parameter.data)

    def save(self, path: Path) -> None:
        from onnxruntime.training import api

        api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state=True)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every bit."""
    found = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def batches(artifacts: Any, count: int, size: int = 4, classes: int = 5, seed: int = 0) -> list[list[torch.Tensor]]:
    """Random inputs that fit the graph."""
    generator = torch.Generator().manual_seed(seed)

    def one(spec: Any) -> torch.Tensor:
        shape = [dim if isinstance(dim, int) else size for dim in spec.shape]
        if spec.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=spec.dtype)
        return torch.randint(0, classes, shape, generator=generator).to(spec.dtype)

    return [[one(spec) for spec in artifacts.inputs] for _ in range(count)]

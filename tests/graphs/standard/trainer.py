"""The training loop around a step model, as a client writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


class Trainer:
    """What a user writes in any language: feed every `X.new` back as `X`."""

    def __init__(self, folder: Path, fused: bool = True) -> None:
        ort = pytest.importorskip("onnxruntime")
        from safetensors.numpy import load_file

        options = ort.SessionOptions()
        if not fused:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self.session = ort.InferenceSession(str(folder / "step_model.onnx"), options, providers=["CPUExecutionProvider"])
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.inputs = [value.name for value in self.session.get_inputs()]
        states = {name.removesuffix(".new") for name in self.outputs if name.endswith(".new")}
        self.state = load_file(folder / "state.safetensors")
        assert states == set(self.state)
        self.data = [name for name in self.inputs if name not in states | {"lr", "step", "seed"}]

    def step(self, number: int, values: Any, lr: float = 0.01, seed: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
        feeds = {**self.state, **{name: value.numpy() for name, value in zip(self.data, values, strict=True)}}
        feeds |= {"lr": np.array(lr, np.float32), "step": np.array(number, np.int64)}
        if seed is not None:
            feeds["seed"] = np.array(seed, np.int64)
        results = dict(zip(self.outputs, self.session.run(None, feeds), strict=True))
        self.state = {name: results.pop(f"{name}.new") for name in self.state}
        return results

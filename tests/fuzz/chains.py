"""A graph grown layer by layer, in ONNX and in PyTorch at once: what ORT's gradient builder and kernels are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

Function = Callable[..., Any]

EXAMPLE_BATCH = 3
TOKENS, CLASSES = 4, 5
"""Tokens per sample of the integer input, and how many different ones there are."""


@dataclass
class Choices:
    """Small numbers that determine a test case. When they run out, every choice is 0, the simplest one."""

    numbers: Sequence[int]
    used: int = 0

    def pick(self, count: int) -> int:
        """One of 0 ... count - 1."""
        number = self.numbers[self.used] if self.used < len(self.numbers) else 0
        self.used += 1
        return number % count

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.pick(len(options))]

    def flag(self) -> bool:
        return bool(self.pick(2))


@dataclass
class Chain:
    """Inputs `x` (float), `tokens` (int64) and `labels` (int64), and what is computed from them so far.

    Axis 0 of every value that one layer hands on to the next is the batch.
    """

    opset: int
    sample: tuple[int, ...]
    generator: torch.Generator
    batch_name: str | int = "batch"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    steps: list[tuple[Function, list[str], list[str]]] = field(default_factory=list)
    example: dict[str, Tensor] = field(default_factory=dict)
    current: str = "x"
    earlier: list[str] = field(default_factory=list)
    loss: str | None = None

    def __post_init__(self) -> None:
        self.example |= self.batch(EXAMPLE_BATCH)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.example[self.current].shape)

    def batch(self, size: int) -> dict[str, Tensor]:
        x = torch.randn(size, *self.sample, generator=self.generator)
        tokens = torch.randint(0, CLASSES, (size, TOKENS), generator=self.generator)
        labels = torch.randint(0, CLASSES, (size,), generator=self.generator)
        labels[0] = 0  # so that not all are ignored: then PyTorch's mean is NaN and ONNX's 0
        return {"x": x, "tokens": tokens, "labels": labels}

    def weight(self, *shape: int, scale: float | None = None, statistic: Tensor | None = None) -> str:
        """A new parameter; `statistic` gives the value of one that is not trained."""
        name = f"weight{len(self.weights) + len(self.statistics)}"
        if statistic is not None:
            self.statistics[name], self.example[name] = statistic, statistic.clone()  # a layer writes into the example's
        else:
            scale = 1 / math.sqrt(max(math.prod(shape[1:]), 1)) if scale is None else scale
            self.weights[name] = self.example[name] = torch.randn(shape, generator=self.generator) * scale
        return name

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.array(values, dtype)
        return name

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def add(
        self,
        kind: str,
        inputs: Iterable[str],
        function: Function,
        *,
        tensors: Sequence[str] | None = None,
        outputs: int = 1,
        keep: int | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """One ONNX node and the PyTorch `function` of its tensors (`tensors`, or all inputs that are not constants or left out).

        The node may have more outputs than PyTorch computes: those after `keep` exist for its gradient only."""
        inputs = list(inputs)
        number = len(self.nodes)
        names = [f"value{number}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"{kind}_{number}", domain=domain, **attributes))
        given = [name for name in inputs if name and name not in self.constants] if tensors is None else list(tensors)
        found = names[: outputs if keep is None else keep]
        self.steps.append((function, given, found))
        self._run(self.steps[-1], self.example)
        return list(found)

    def then(self, kind: str, inputs: Iterable[str], function: Function, **settings: Any) -> None:
        """As `add`, going on from the first output."""
        self.go_on(self.add(kind, inputs, function, **settings)[0])

    def go_on(self, name: str) -> None:
        self.earlier.append(self.current)
        self.current = name

    def reshape(self, *sample: int) -> None:
        """The same elements of each sample in another shape."""
        shape = self.constant([-1, *sample])
        self.then("Reshape", [self.current, shape], lambda x: x.reshape(-1, *sample))

    def into(self, *sample: int) -> None:
        """A linear layer that gives each sample this shape."""
        size = math.prod(self.shape[1:])
        if len(self.shape) != 2:
            self.reshape(size)
        self.then("MatMul", [self.current, self.weight(size, math.prod(sample), scale=1 / math.sqrt(size))], torch.matmul)
        if len(sample) != 1:
            self.reshape(*sample)

    def finish(self) -> None:
        """A scalar: the sine of the product with a fixed direction, summed. Does nothing where a layer has made one."""
        if self.loss is not None:
            return
        direction = self.constant(self.random(*self.shape[1:]).numpy(), np.float32)
        fixed = torch.from_numpy(self.constants[direction])
        self.then("Mul", [self.current, direction], lambda x: x * fixed.to(x.dtype))
        self.then("Sin", [self.current], torch.sin)
        self.then("ReduceSum", [self.current], lambda x: x.sum(), keepdims=0)
        self.loss = self.current

    def model(self) -> onnx.ModelProto:
        assert self.loss is not None
        used = {name for node in self.nodes for name in node.input}
        kinds = {"x": onnx.TensorProto.FLOAT, "tokens": onnx.TensorProto.INT64, "labels": onnx.TensorProto.INT64}
        inputs = [
            helper.make_tensor_value_info(name, kind, [self.batch_name, *self.example[name].shape[1:]])
            for name, kind in kinds.items()
            if name in used
        ]
        values = {**self.constants, **{name: value.numpy() for name, value in (self.weights | self.statistics).items()}}
        initializers = [numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name) for name, value in values.items()]
        output = helper.make_tensor_value_info(self.loss, onnx.TensorProto.FLOAT, [])
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph(self.nodes, "chain", inputs, [output], initializers)
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 8
        return model

    def run(self, batch: dict[str, Tensor], parameters: dict[str, Tensor]) -> Tensor:
        """The loss in PyTorch. Running statistics in `parameters` are updated in place."""
        assert self.loss is not None
        values = {**batch, **parameters}
        for step in self.steps:
            self._run(step, values)
        return values[self.loss]

    @staticmethod
    def _run(step: tuple[Function, list[str], list[str]], values: dict[str, Tensor]) -> None:
        function, inputs, outputs = step
        result = function(*(values[name] for name in inputs))
        values.update(zip(outputs, result if isinstance(result, (tuple, list)) else [result], strict=True))

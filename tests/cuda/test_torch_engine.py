"""The torch engine on the model of CUDA, operator by operator: forward and backward on the device, without a wait.

The cases are the `onnx` package's vectors, one for each operator and types of inputs.
"""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper

import torch_ort_ckpt as toc
from tests.cuda_model.interface import Cuda
from tests.graphs.translation.test_onnx_nodes import CASES, RUN, as_torch, assert_equal
from tests.models import batch, exported
from torch_ort_ckpt.graphs.translation import translate

CONSTANT = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Split", "SplitToSequence", "CumSum", "TopK", "Trilu"), (1,)),
    **dict.fromkeys(("CenterCropPad", "OneHot", "Upsample", "AffineGrid"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"), (1,)),
    **dict.fromkeys(("ReduceProd", "ReduceSum", "ReduceSumSquare"), (1,)),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "MaxUnpool": (2,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
}
"""Inputs that say how to compute rather than what: shapes, axes, a rate. Graphs have them as constants, which the host knows."""
WAITS = {
    "Compress": "as many results as conditions are true",
    "NonZero": "as many results as numbers are not zero",
    "If": "the host decides by a value of the device",
    "Loop": "the host decides by a value of the device",
}
"""Operators for which the host must wait, in PyTorch's own code too."""
NOT_DIFFERENTIABLE = {"BatchNormalization": 3, "NegativeLogLikelihoodLoss": 1, "SoftmaxCrossEntropyLoss": 1}
"""How many of the first inputs have gradients, where not all floating ones have."""
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def one_of_each_kind() -> dict[str, str]:
    """Names of cases, by operator and types of inputs."""
    found: dict[str, str] = {}
    for name in RUN:
        graph = CASES[name].model.graph
        if len(graph.node) == 1 and graph.node[0].op_type not in WAITS:
            types = ",".join(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower() for value in graph.input)
            found.setdefault(f"{graph.node[0].op_type}({types})", name)
    return found


KINDS = one_of_each_kind()
STEPS = [(name, False) for name in ("mlp", "cnn", "lstm", "transformer")] + [(name, True) for name in ("mlp", "lstm", "transformer")]
"""Not the compiled cnn: the model of CUDA writes its running statistics with `copy_`, which `torch.func.grad` refuses; PyTorch's kernel
writes them itself."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_runs_forward_and_backward_without_a_wait(cuda: Cuda, kind: str) -> None:
    case = CASES[KINDS[kind]]
    translation = translate(with_constants(case))
    translation.module.to("cuda")
    inputs, outputs = case.data_sets[0]
    operator = case.model.graph.node[0].op_type
    given = {value.name: on_device(as_torch(array)) for value, array in zip(case.model.graph.input, inputs, strict=False)}
    arguments = [given[name] for name in translation.inputs]
    if not any(value.dtype in _UNSIGNED for value in arguments if isinstance(value, torch.Tensor)):
        for value in arguments[: NOT_DIFFERENTIABLE.get(operator)]:
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
                value.requires_grad_()
    with cuda.no_waits():
        found = translation.module.forward(*arguments)
        results = [value for value in found if isinstance(value, torch.Tensor) and value.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(value) for value in results])
    for value, expected in zip(found, outputs, strict=True):
        assert_equal(on_host(value), expected, case)
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.grad is not None:
            assert value.grad.device == value.device


@pytest.mark.ort
@pytest.mark.parametrize(("name", "compiled"), STEPS)
def test_a_step_of_a_whole_model(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool) -> None:
    """Forward, backward and update. Compiled: the functions that are compiled, with the backend that generates no code."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend="eager"))
    found = []
    for device in ("cuda", "cpu"):
        model = toc.OrtModule(exported(name), device=device, engine="torch", compile=compiled)
        optimizer = toc.OrtOptimizer(model, lr=0.01)
        given = [value.to(device) for value in batch(name)]
        losses = []
        with cuda.no_waits():
            for _ in range(2):
                loss = model(*given)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            model.train_step(*given)
        assert {value.grad.device.type for value in model.parameters() if value.grad is not None} == {device}
        found.append([loss.cpu() for loss in losses])
    torch.testing.assert_close(found[0], found[1])


def test_the_cases_cover_the_operators() -> None:
    assert len({kind.partition("(")[0] for kind in KINDS}) >= 150


@pytest.mark.parametrize("name", WAITS)
def test_operators_that_must_wait_do(cuda: Cuda, name: str) -> None:
    """The list holds no operator that could be tested above."""
    case = next(CASES[name_] for name_ in RUN if [node.op_type for node in CASES[name_].model.graph.node] == [name])
    translation = translate(case.model)
    translation.module.to("cuda")
    inputs, _ = case.data_sets[0]
    given = {value.name: on_device(as_torch(array)) for value, array in zip(case.model.graph.input, inputs, strict=False)}
    before = len(cuda.waits)
    translation.module.forward(*(given[key] for key in translation.inputs))
    assert len(cuda.waits) > before


def with_constants(case: Any) -> onnx.ModelProto:
    """The model with the inputs of `CONSTANT` as initializers."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    names = {node.input[place] for place in CONSTANT.get(node.op_type, ()) if place < len(node.input) and node.input[place]}
    arrays = dict(zip([value.name for value in model.graph.input], case.data_sets[0][0], strict=False))
    for name in sorted(names & arrays.keys()):
        array = arrays[name]
        tensor = onnx.TensorProto()
        tensor.CopyFrom(array if isinstance(array, onnx.TensorProto) else numpy_helper.from_array(array))
        tensor.name = name
        model.graph.initializer.append(tensor)
        model.graph.input.remove(next(value for value in model.graph.input if value.name == name))
    return model


def on_device(value: Any) -> Any:
    return [on_device(item) for item in value] if isinstance(value, list) else value.to("cuda")


def on_host(value: Any) -> Any:
    return [on_host(item) for item in value] if isinstance(value, list) else value.detach().cpu()

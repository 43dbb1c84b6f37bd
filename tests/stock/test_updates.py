"""The optimizer's step in standard operators, in place on PyTorch's memory."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from torch_ort_ckpt.engines import EngineOptions
from torch_ort_ckpt.engines.ort.memory import side_by_side, zeros_like_all
from torch_ort_ckpt.engines.ort.standard_updates import StandardRun
from torch_ort_ckpt.engines.updates import TorchUpdater, Update
from torch_ort_ckpt.graphs.standard.optimizer import update_model
from torch_ort_ckpt.graphs.standard.update import NEW

pytestmark = pytest.mark.ort_any

SPECS = {
    "adamw": toc.OptimizerSpec("AdamW", eps=1e-8, weight_decay=0.01),
    "mode 1": toc.OptimizerSpec("AdamW", eps=1e-6, weight_decay=0.1, adam_mode=1),
    "uncorrected": toc.OptimizerSpec("AdamW", eps=1e-6, correct_bias=False),
    "clipping": toc.OptimizerSpec("AdamW", max_norm=0.3),
    "sgd": toc.OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0),
    "sgd clipping": toc.OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0, max_norm=0.3),
}
SHAPES = [(16, 4), (3,), (), (0,), (7, 5), (32,), (150, 150)]


def tensors(spec: toc.OptimizerSpec) -> Update:
    generator = torch.Generator().manual_seed(0)
    parameters = side_by_side(SHAPES)
    for value in parameters:
        value.copy_(torch.randn(value.shape, generator=generator))
    gradients = [torch.zeros(0)] * len(SHAPES)
    moments = [zeros_like_all(parameters) if spec.kind == "AdamW" else [] for _ in range(2)]
    return Update(parameters, gradients, *moments, 0, 0.0, spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_updates_as_pytorch_s_kernels_do(spec: toc.OptimizerSpec) -> None:
    run, reference = StandardRun(spec, EngineOptions(threads=1), None), TorchUpdater()
    found, expected = tensors(spec), tensors(spec)
    buffers = [side_by_side(SHAPES) for _ in range(2)]  # as the pool of gradients has several
    for step in range(1, 7):
        generator = torch.Generator().manual_seed(step)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        found.gradients = [place.copy_(value) for place, value in zip(buffers[step % 2], values, strict=True)]
        expected.gradients = [value.clone() for value in values]
        for update in (found, expected):
            update.step, update.lr = step, 0.1 / step
        places = [value.data_ptr() for value in found.parameters]
        assert run.apply(found)
        reference.apply(expected)
        assert [value.data_ptr() for value in found.parameters] == places
        for role in ("parameters", "gradients", "first", "second"):
            for one, other in zip(getattr(found, role), getattr(expected, role), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_a_rate_of_zero_moves_nothing() -> None:
    update = tensors(SPECS["adamw"])
    update.gradients = [torch.ones(shape) for shape in SHAPES]
    before = [value.clone() for value in update.parameters]
    update.step, update.lr = 1, 0.0
    assert StandardRun(SPECS["adamw"], EngineOptions(threads=1), None).apply(update)
    assert all(map(torch.equal, update.parameters, before))
    assert all(bool((value != 0).all()) for value in update.first)


@pytest.mark.parametrize("joined", [0, 20_000])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_is_read_after_it_was_overwritten(spec: toc.OptimizerSpec, joined: int) -> None:
    """An output is bound to the memory of its input: who reads the input must come before who writes the output."""
    model = update_model(spec, [64, 7, 30_000], joined)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    producers = {name: place for place, node in enumerate(model.graph.node) for name in node.output}
    states = [value.name for value in model.graph.output]
    assert states
    for name in states:
        writer = producers[name]
        for place, node in enumerate(model.graph.node):
            if name.removesuffix(NEW) in node.input:
                if place == writer:
                    assert node.op_type in ("Add", "Sub", "Mul")
                else:
                    assert place in _before(model.graph, writer, producers), f"{node.op_type} reads {name.removesuffix(NEW)} too late"


def _before(graph: onnx.GraphProto, place: int, producers: dict[str, int]) -> set[int]:
    """The nodes that this one needs."""
    found: set[int] = set()
    waiting = [place]
    while waiting:
        for name in graph.node[waiting.pop()].input:
            if name in producers and producers[name] not in found:
                found.add(producers[name])
                waiting.append(producers[name])
    return found


def test_parameters_without_a_gradient_and_groups() -> None:
    def train(fused: bool) -> tuple[toc.OrtModule, Any]:
        model = toc.OrtModule(exported("mlp", optimizer=SPECS["adamw"]), engine="ort", threads=1)
        parts = dict(model.named_parameters())
        groups = [{"params": [parts["fc1.weight"], parts["fc1.bias"]], "lr": 0.1}, {"params": [parts["fc2.weight"], parts["fc2.bias"]]}]
        optimizer = toc.OrtOptimizer(model, lr=0.01, params=groups, fused=fused)
        for number in range(4):
            model(*batch("mlp", seed=number)).backward()
            if number % 2:
                parts["fc2.bias"].grad = None
            if number == 2:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (model, optimizer), (expected, _) = train(False), train(True)
    assert optimizer.updated
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=2e-5, atol=2e-6)


def test_tensors_it_can_not_update_are_refused() -> None:
    update = tensors(SPECS["adamw"])
    update.gradients = [torch.ones(shape, dtype=torch.float64) for shape in SHAPES]
    with pytest.raises(toc.CheckpointError, match="not float64 ones"):
        StandardRun(SPECS["adamw"], EngineOptions(threads=1), None).apply(update)

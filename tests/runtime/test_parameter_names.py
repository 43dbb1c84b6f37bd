"""A parameter may have any name, those of OrtModule's own attributes and methods too."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import exported
from torch_ort_ckpt.runtime.scopes import Scope

pytestmark = pytest.mark.ort


def clashing() -> list[str]:
    """Every attribute and method of a module, of its scopes, and a few names around them."""
    model = toc.OrtModule(exported("mlp"), threads=1)
    own = {*vars(model), *dir(model)} - set(model._modules)
    flat = sorted(name for name in own if name != "lazy_reset_grad")  # which is an input of every training graph
    flat += ["self", "torch", "class", "lambda", "operator", "inf", "print", "x.y", "½", "1", "a b"]
    dotted = [f"{name}.weight" for name in ("names", "properties", "training", "forward", "_modules", "engine")]
    scoped = [f"fc.{name}" for name in sorted({*vars(Scope([])), "forward", "train", "weight", "names"})]
    return [name for name in flat if name not in {part.split(".")[0] for part in dotted}] + dotted + scoped


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[toc.Artifacts, dict[str, torch.Tensor]]:
    """`mean((x @ w + p1 + p2 + ... - target)^2)`, with parameters p of all these names."""
    from onnxruntime.training import artifacts as ort

    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((3, 4)).astype("f")}
    values |= {name: rng.standard_normal(4).astype("f") / 20 for name in clashing()}
    nodes, last = [helper.make_node("MatMul", ["x", "w"], ["sum0"])], "sum0"
    for number, name in enumerate(list(values)[1:], 1):
        nodes.append(helper.make_node("Add", [last, name], [f"sum{number}"]))
        last = f"sum{number}"
    graph = helper.make_graph(
        nodes,
        "names",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    ort.generate_artifacts(
        model, requires_grad=list(values), loss=ort.LossType.MSELoss, optimizer=ort.OptimType.SGD, artifact_directory=str(folder)
    )
    return toc.Artifacts.load(folder), {name: torch.from_numpy(value) for name, value in values.items()}


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_every_name_is_trained_saved_and_copied(
    artifacts: tuple[toc.Artifacts, dict[str, torch.Tensor]], tmp_path: Path, engine: str
) -> None:
    found, initial = artifacts
    values = {name: value.clone().requires_grad_() for name, value in initial.items()}
    model = toc.OrtModule(found, engine=engine, threads=1)
    assert set(model.state_dict()) == set(values)
    assert isinstance(model.artifacts, toc.Artifacts)
    optimizer = toc.OrtOptimizer(model, lr=0.1, fused=True)
    for seed in range(2):
        x, target = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)), torch.zeros(5, 4)
        loss = model.train()(x, target)
        expected = F.mse_loss(x @ values["w"] + sum(value for name, value in values.items() if name != "w"), target)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        loss.backward()
        gradients = torch.autograd.grad(expected, list(values.values()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for value, gradient in zip(values.values(), gradients, strict=True):
                value.sub_(gradient, alpha=0.1)
    model.train_step(x, target)
    evaluated = model.eval()(x, target)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, values[name].detach(), rtol=1e-4, atol=1e-6)
    toc.save(model.checkpoint(optimizer), tmp_path / "checkpoint")
    again = toc.OrtModule(found, engine=engine, threads=1)
    again.load_checkpoint(tmp_path / "checkpoint", toc.OrtOptimizer(again, fused=True))
    assigned = toc.OrtModule(found, engine=engine, threads=1)
    assigned.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for other in (again, assigned, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other.eval()(x, target), evaluated, rtol=0, atol=0)
        assert set(other.state_dict()) == set(values)


def test_setting_an_ordinary_parameter_to_a_number_is_still_refused(artifacts: tuple[toc.Artifacts, dict[str, torch.Tensor]]) -> None:
    model = toc.OrtModule(artifacts[0], threads=1)
    with pytest.raises(TypeError, match="cannot assign"):
        model.w = 3

"""The joint graph of forward and backward: PyTorch's own way, and the one that does without its private function, give the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.gradients import private_export
from torch_ort_ckpt.graphs.gradients.torch_builder import Gradients, build


class Normed(nn.Module):
    """A buffer that the forward changes, a frozen weight, a constant, and a size that stays open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.out.bias.requires_grad_(False)
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.norm(self.fc(x)))) * self.scale


def made() -> Gradients:
    return build(Normed(), (torch.ones(6, 4),), "cross_entropy", dynamic_shapes={"x": {0: "batch"}, "labels": {0: "batch"}})


def results(found: Gradients, batch: int) -> dict[str, np.ndarray]:
    """Every output of the joint graph by its name, on a batch of this size."""
    torch.manual_seed(1)
    model = found.graph.model
    values = {name: value.detach().numpy() for name, value in found.states.items()}
    values |= {"x": torch.randn(batch, 4).numpy(), "labels": torch.randint(3, (batch,)).numpy()}
    outputs = ReferenceEvaluator(model).run(None, {value.name: values[value.name] for value in model.graph.input})
    return dict(zip((value.name for value in model.graph.output), outputs, strict=True))


def test_without_pytorch_s_private_function_the_graph_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = made()
    monkeypatch.setattr(private_export, "_decompose_exported_program", None)
    assert not private_export.has_first_way()
    second = made()
    onnx.checker.check_model(second.graph.model)
    assert first.trainable == second.trainable
    for batch in (6, 3):
        expected, found = results(first, batch), results(second, batch)
        assert list(found) == list(expected)
        assert len(found) > 1 + len(first.trainable)  # the loss, the gradients, and the running statistics
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_line_of_an_error_is_all_that_another_private_name_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_export, "_FIXING", "_no_such_method")
    assert results(made(), 2)["loss"].shape == ()


@pytest.mark.parametrize("private", [True, False])
def test_artifacts_of_either_way_train_alike(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        monkeypatch.setattr(private_export, "_decompose_exported_program", None)
    native = Normed()
    artifacts = toc.export_artifacts(native, (torch.ones(6, 4),), tmp_path / "artifacts", builder="torch")
    torch.manual_seed(2)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    nn.functional.cross_entropy(native(x), y).backward()
    model = toc.OrtModule(artifacts, engine="torch")
    model(x, y).backward()
    for name, parameter in native.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.get_buffer("norm.running_var"), native.norm.running_var)

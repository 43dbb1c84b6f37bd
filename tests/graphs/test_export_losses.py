"""`loss="cross_entropy"` over any number of dimensions is PyTorch's, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc

pytestmark = pytest.mark.ort


class PerStep(nn.Module):
    """Batch x sequence x classes, or with the classes on axis 1."""

    def __init__(self, classes: int, first: bool) -> None:
        super().__init__()
        self.fc, self.first = nn.Linear(4, classes), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.fc(x)
        return scores.permute(0, x.dim() - 1, *range(1, x.dim() - 1)) if self.first else scores


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 5, 4), (2, 3, 6, 4)], ids=["as many steps as classes", "fewer steps", "two dimensions"])
@pytest.mark.parametrize("axis", [1, -1])
def test_k_dimensional_cross_entropy(shape: tuple[int, ...], axis: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    native, x, labels = PerStep(6, axis == 1), torch.randn(shape), torch.randint(0, 6, shape[:-1])
    labels.view(-1)[0] = -100  # left out, as PyTorch does
    artifacts = toc.export_artifacts(native, (x,), tmp_path, exporter="torchscript", class_axis=axis, extra_outputs=True)
    expected = F.cross_entropy(native(x).movedim(axis, 1), labels)
    expected.backward()
    for engine in ("ort", "torch"):
        model = toc.OrtModule(artifacts, engine=engine)
        loss, scores = model(x, labels)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(scores, native(x).detach())
        torch.testing.assert_close(model.fc.weight.grad, native.fc.weight.grad)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x, labels)[0], expected.detach())


def test_more_than_two_dimensions_without_a_class_axis_are_refused(tmp_path: Path) -> None:
    for steps in (6, 5):
        with pytest.raises(toc.CheckpointError, match="can mean two things") as caught:
            toc.export_artifacts(PerStep(6, False), (torch.randn(3, steps, 4),), tmp_path / "new", exporter="torchscript")
        assert "class_axis=-1" in str(caught.value)
    assert not (tmp_path / "new").exists()
    for axis in (0, 3, -3):
        with pytest.raises(toc.CheckpointError, match="not a class axis"):
            toc.export_artifacts(PerStep(6, False), (torch.randn(3, 6, 4),), tmp_path, exporter="torchscript", class_axis=axis)
    with pytest.raises(toc.CheckpointError, match="class_axis is for"):
        toc.export_artifacts(PerStep(6, False), (torch.randn(3, 6, 4),), tmp_path, "mse", exporter="torchscript", class_axis=1)


def test_a_graph_that_onnx_finds_invalid_is_our_error(tmp_path: Path) -> None:
    class Negative(PerStep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).movedim(-1, 1)  # the older exporter writes a Transpose with a negative axis

    with pytest.raises(toc.CheckpointError, match="Transpose"):
        toc.export_artifacts(Negative(6, True), (torch.randn(3, 5, 4),), tmp_path, exporter="torchscript", class_axis=1)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_module_that_returns_its_cross_entropy(exporter: str, tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.fc(x), y)

    torch.manual_seed(0)
    native, x, y = WithLoss(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    artifacts = toc.export_artifacts(native, (x, y), tmp_path, loss=None, exporter=exporter)
    expected = native(x, y)
    expected.backward()
    for engine in ("ort", "torch"):
        model = toc.OrtModule(artifacts, engine=engine)
        loss = model(x, y)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(model.fc.weight.grad, native.fc.weight.grad)

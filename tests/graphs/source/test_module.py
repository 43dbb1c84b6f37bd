"""`to_torch_module`: a plain module, and source that needs only torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.engines.conftest import exported  # noqa: F401  # a fixture
from tests.engines.zoo import FAMILIES
from tests.truth import DATA

Exported = Callable[[str], tuple[Path, nn.Module]]
ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


@pytest.mark.ort
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ort])
def test_it_computes_what_the_engine_computes(name: str, exported: Exported) -> None:  # noqa: F811
    artifacts = toc.Artifacts.load(exported(name)[0])
    plain, model = toc.to_torch_module(artifacts), toc.OrtModule(artifacts, engine="torch")
    assert type(plain).__name__ == "Model"
    batch = FAMILIES[name].batch(2)
    losses = [module(*batch) for module in (plain, model)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    theirs = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=0, atol=0)
    assert plain.eval()(*batch).item() == model.eval()(*batch).item()


def test_parameters_have_the_names_and_values_of_the_checkpoint() -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    module = toc.to_torch_module(artifacts)
    assert {name for name, _ in module.named_parameters()} == artifacts.state.trainable.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, artifacts.state.parameters[name])


def test_other_outputs_than_the_loss() -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    module = toc.to_torch_module(artifacts, outputs=["logits"])
    x = torch.randn(3, artifacts.inputs[0].shape[1])
    logits = module(x)
    labels = torch.randint(0, logits.shape[1], (3,))
    loss = toc.OrtModule(artifacts, engine="torch")(x, labels)
    torch.testing.assert_close(nn.functional.cross_entropy(logits, labels), loss)
    with pytest.raises(toc.CheckpointError, match="no graph has all of nothing"):
        toc.to_torch_module(artifacts, outputs=["nothing"])


@pytest.mark.ort
def test_a_value_may_have_the_name_of_a_function_that_the_source_defines(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    artifacts = toc.export_artifacts(module, (torch.randn(2, 4),), tmp_path, exporter="torchscript")
    for model in (artifacts.training, artifacts.eval):
        assert model is not None
        for node in model.graph.node:
            for names in (node.input, node.output):
                for place, name in enumerate(names):
                    if name == "output":
                        names[place] = "gemm"
    x, labels = torch.randn(5, 4), torch.randint(0, 3, (5,))
    plain = toc.to_torch_module(artifacts, source=tmp_path / "model.py")
    assert "gemm_ = gemm(" in (tmp_path / "model.py").read_text()
    torch.testing.assert_close(plain(x, labels), nn.functional.cross_entropy(module(x), labels))


def test_the_source_runs_where_this_library_is_not(tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    module = toc.to_torch_module(artifacts, source=tmp_path / "model.py")
    batch = [torch.randn(4, artifacts.inputs[0].shape[1]), torch.zeros(4, dtype=torch.int64)]
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    torch.save(batch, tmp_path / "batch.pt")
    text = (tmp_path / "model.py").read_text()
    assert "torch_ort_ckpt" not in text
    assert "def gemm(" in text
    assert "self.fc1.weight" in text
    program = """
import sys, torch
sys.modules["torch_ort_ckpt"] = sys.modules["onnx"] = None
from model import Model
model = Model()
model.load_state_dict(torch.load("weights.pt", weights_only=True))
print(repr(model(*torch.load("batch.pt", weights_only=True)).item()))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == repr(module(*batch).item()), result.stderr[-2000:]

"""`OrtModule` against ONNX Runtime's own training API: loss, gradients and evaluation, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.official import Official, artifact_folders, assert_same, batches, loads_officially
from tests.truth import DATA

pytestmark = pytest.mark.ort_any

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


@pytest.fixture
def artifacts() -> toc.Artifacts:
    return toc.Artifacts.load(ADAMW)


@pytest.fixture
def model(artifacts: toc.Artifacts) -> toc.OrtModule:
    return toc.OrtModule(artifacts, threads=1)


@pytest.mark.parametrize("name", artifact_folders())
@pytest.mark.ort
def test_loss_gradients_and_evaluation_equal_the_official_api(name: str, tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(DATA / name)
    if artifacts.state.nominal:
        artifacts = toc.Artifacts.load(DATA / name, checkpoint=DATA / name / "complete_checkpoint")
    model = toc.OrtModule(artifacts, threads=1)
    (batch,) = batches(artifacts, 1)
    loss = model(*batch)
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.named_trainable().values())
    if not loads_officially(artifacts):
        again = toc.OrtModule(artifacts, threads=1)
        assert_same(again.train_step(*batch), loss)
        return
    official = Official(artifacts, tmp_path)
    assert_same(loss, official.loss(*batch))
    gradients = dict(official.gradients())
    assert gradients.keys() == model.named_trainable().keys()
    for name, parameter in model.named_trainable().items():
        assert_same(parameter.grad, gradients[name])
    assert_same(model.eval()(*batch), official.evaluate(*batch))


def test_names_and_values_are_those_of_the_checkpoint(model: toc.OrtModule, artifacts: toc.Artifacts) -> None:
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == artifacts.state.trainable.keys()
    assert model.state_dict().keys() == artifacts.state.parameters.keys()
    for name, value in model.state_dict().items():
        assert_same(value, artifacts.state.parameters[name])
    assert model.fc1.weight is dict(model.named_parameters())["fc1.weight"]

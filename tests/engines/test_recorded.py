"""Losses recorded when each ORT release resumed from its own checkpoint: the torch engine computes the same, without ORT."""

from __future__ import annotations

import json

import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import DATA, Truth

RECORDED = sorted(
    place.parent.name for place in DATA.glob("*/training_model.onnx") if json.loads((place.parent / "truth.json").read_text()).get("resume")
)


@pytest.mark.parametrize("name", RECORDED)
def test_training_goes_on_as_it_did_in_the_release_that_wrote_it(name: str) -> None:
    truth = Truth(name)
    resume = truth.json["resume"]
    artifacts = toc.Artifacts.load(truth.folder)
    model = toc.OrtModule(artifacts, engine="torch")
    if "ort1_14" in name:  # this release forgot the moments it had saved
        model._table.saved_moments.groups = {}
    optimizer = toc.OrtOptimizer(model, lr=resume["learning_rate"])
    for group in optimizer.param_groups:
        group["lr"] = resume["learning_rate"]
    for number, expected in enumerate(resume["losses"]):
        batch = [torch.as_tensor(truth.arrays[f"x_resume_{kind}{number}"]) for kind in ("in", "target")]
        loss = model(*batch)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model.named_trainable()
    for key, array in resume.get("final_params", {}).items():
        torch.testing.assert_close(trained[key].detach(), torch.as_tensor(truth.arrays[array]), rtol=1e-5, atol=1e-6)
    group = model.checkpoint(optimizer).optimizer["group0"]
    assert group.states.keys() == trained.keys()

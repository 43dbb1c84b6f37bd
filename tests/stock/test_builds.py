"""What the installed build can do, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.conftest import trains
from tests.engines.test_recorded import RECORDED
from tests.models import exported
from tests.stock.conftest import pretend
from tests.truth import DATA, Truth
from torch_ort_ckpt.engines.ort import build

pytestmark = pytest.mark.ort_any


@pytest.mark.skipif(trains(), reason="a training build runs them as they are (tests/runtime/test_generations.py)")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_go_on_as_they_did_in_the_release_that_wrote_them(name: str) -> None:
    """Gradients are rebuilt from the forward graph. The losses, and the parameters at the end, are those of ORT 1.14 to 1.19."""
    truth = Truth(name)
    resume = truth.json["resume"]
    model = toc.OrtModule(toc.Artifacts.load(truth.folder), engine="ort")
    if "ort1_14" in name:  # this release forgot the moments it had saved
        model._table.saved_moments.groups = {}
    optimizer = toc.OrtOptimizer(model, lr=resume["learning_rate"])
    assert not optimizer.fused
    for group in optimizer.param_groups:
        group["lr"] = resume["learning_rate"]
    if not build.installed().dlpack and torch.bfloat16 in {value.dtype for value in model.named_tensors().values()}:
        with pytest.raises(toc.CheckpointError, match="can't share bfloat16"):
            model(*(torch.as_tensor(truth.arrays[f"x_resume_{kind}0"]) for kind in ("in", "target")))
        return
    for number, expected in enumerate(resume["losses"]):
        loss = model(*(torch.as_tensor(truth.arrays[f"x_resume_{kind}{number}"]) for kind in ("in", "target")))
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, array in resume.get("final_params", {}).items():
        found = model.named_trainable()[key].detach()
        torch.testing.assert_close(found, torch.as_tensor(truth.arrays[array]), rtol=0, atol=1e-5)


def test_auto_takes_ort_where_it_need_not_rebuild_gradients(stock: build.Build) -> None:
    ours = toc.OrtModule(exported("mlp")).engine
    assert (ours.name, ours.reason) == ("ort", f"{stock} runs these graphs")
    assert repr(ours) == f"engine ort ({stock} runs these graphs)"
    other = toc.OrtModule(DATA / "fbv2_ort1_19_2_adamw_full").engine
    assert other.name == "torch"
    assert "would build the gradients again at each start" in other.reason
    assert toc.OrtModule(DATA / "fbv2_ort1_19_2_adamw_full", engine="ort").engine.reason == str(stock)


def test_graphs_in_ort_s_own_format_are_refused_with_the_cure(tmp_path: Path) -> None:
    from tests.models import in_ort_format

    if not trains():
        pytest.skip("only a training build can write them")
    folder = in_ort_format("mlp", tmp_path)
    model = toc.OrtModule(folder, engine="ort")
    with pytest.raises(toc.CheckpointError, match=r"Keep training_model\.onnx"):
        model(torch.zeros(4, 12), torch.zeros(4, dtype=torch.int64))


def test_a_build_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime
    from onnxruntime.capi import _pybind_state as native

    monkeypatch.undo()
    for name in ("Module", "Optimizer"):
        if hasattr(native, name):
            monkeypatch.delattr(native, name)
    monkeypatch.setattr(onnxruntime, "__version__", "1.10.0")
    build.installed.cache_clear()
    try:
        with pytest.raises(toc.CheckpointError, match=r"onnxruntime 1\.10\.0 is too old.*upgrade onnxruntime"):
            toc.OrtModule(exported("mlp"), engine="ort")
        assert toc.OrtModule(exported("mlp")).engine.name == "torch"
    finally:
        monkeypatch.undo()
        build.installed.cache_clear()


def test_the_version_is_the_package_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    assert build.version_number(build.installed().version) == tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    assert str(pretend(monkeypatch, trains=True, version="1.19.2")) == "onnxruntime-training 1.19.2"


def test_gradients_are_rebuilt_where_autograd_is_off() -> None:
    """`train_step` is the first to need the training graph, and it runs without autograd."""
    model = toc.OrtModule(DATA / "fbv2_ort1_19_2_initial", engine="ort")
    with torch.inference_mode():
        model.train_step(torch.zeros(4, 12), torch.zeros(4, dtype=torch.int64))
    assert all(parameter.grad is not None for parameter in model.named_trainable().values())

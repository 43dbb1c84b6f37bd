"""A user's `onnxruntime.SessionOptions` (custom operators, thread counts) are kept when the model is copied or moved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported

pytestmark = pytest.mark.ort_any


@pytest.fixture
def model(tmp_path: Path) -> toc.OrtModule:
    """Its sessions write a file, which shows that they were created with these options."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    return toc.OrtModule(exported("mlp"), engine="ort", session_options=options)


def leaves_a_file(model: Any, folder: Path) -> bool:
    (folder / "optimized.onnx").unlink(missing_ok=True)
    model(*batch("mlp"))
    return (folder / "optimized.onnx").exists()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda model: torch.optim.swa_utils.AveragedModel(model).module])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_keeps_them(model: toc.OrtModule, tmp_path: Path, duplicate: Any, used: bool) -> None:
    if used:
        assert leaves_a_file(model, tmp_path)
    other = duplicate(model)
    assert other.options.session_options is model.options.session_options
    assert leaves_a_file(other, tmp_path)


def test_a_copied_optimizer_keeps_them(model: toc.OrtModule, tmp_path: Path) -> None:
    other = copy.deepcopy(toc.OrtOptimizer(model))
    assert other.model is not model
    assert leaves_a_file(other.model, tmp_path)


def test_a_deep_copy_shares_no_tensor(model: toc.OrtModule) -> None:
    other = copy.deepcopy(model)
    for one, copied in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert one.data_ptr() != copied.data_ptr()
        torch.testing.assert_close(one, copied, rtol=0, atol=0)
    assert isinstance(other.fc1.weight, torch.nn.Parameter)
    assert other._table._graph_places[0][0] in list(other.modules())


def test_a_pickle_says_that_it_can_not_hold_them(model: toc.OrtModule) -> None:
    with pytest.warns(toc.CheckpointWarning, match="session_options can't be pickled"):
        stored = pickle.dumps(model)
    other = pickle.loads(stored)
    assert other.options.session_options is None
    torch.testing.assert_close(other(*batch("mlp")), model(*batch("mlp")), rtol=1e-6, atol=1e-7)
    pickle.dumps(toc.OrtModule(exported("mlp"), engine="ort"))  # without session options there is no warning

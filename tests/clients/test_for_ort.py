"""`for_ort` writes what that release reads. That the releases themselves train it is shown by `tox -e clients`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc

pytest.importorskip("onnxscript")


@pytest.mark.parametrize(("release", "version", "newest_ir"), [("1.16", 1, 9), ("1.17.3", 1, 9), ("1.18", 2, 10), (None, 2, 10)])
def test_versions_of_graphs_and_checkpoint(release, version, newest_ir, tmp_path):
    artifacts = toc.export_artifacts(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(2, 3), tmp_path, for_ort=release)
    assert toc.load(tmp_path / "checkpoint").format_version == version
    for model in (artifacts.training, artifacts.eval, artifacts.optimizer):
        assert model.ir_version <= newest_ir
        used = {node.domain for node in model.graph.node}
        assert {item.domain for item in model.opset_import} <= used | {"", "ai.onnx"}
    assert ("1.num_batches_tracked" in artifacts.state.frozen) == (version == 2)


def test_what_an_old_release_can_not_have_is_refused(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(toc.CheckpointError, match="momentum"):
        toc.export_artifacts(module, torch.randn(2, 3), tmp_path, for_ort="1.17")
    assert not list(tmp_path.iterdir())


def test_an_unknown_release_is_refused(tmp_path):
    with pytest.raises(toc.CheckpointError, match=r"1\.15.*no release that trains"):
        toc.export_artifacts(nn.Linear(3, 4), torch.randn(2, 3), tmp_path, for_ort="1.15")

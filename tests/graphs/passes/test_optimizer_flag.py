"""The output of an AdamW graph of ORT 1.14 and 1.15."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.optimizer import optimizer_model
from torch_ort_ckpt.graphs.passes.optimizer_flag import declare_flag_boolean


def flag(model: onnx.ModelProto) -> int:
    return model.graph.output[0].type.tensor_type.elem_type


@pytest.mark.parametrize(("kind", "count"), [("AdamW", 1), ("SGD", 0)])
def test_int64_becomes_boolean(kind: str, count: int) -> None:
    model = optimizer_model(toc.OptimizerSpec(kind))
    assert declare_flag_boolean(model) == 0
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    assert declare_flag_boolean(model) == count
    assert flag(model) == (TensorProto.BOOL if count else TensorProto.INT64)

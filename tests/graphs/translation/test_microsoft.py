"""The com.microsoft operators, one node each, against onnxruntime's own kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from torch_ort_ckpt.graphs.translation import translate

pytestmark = pytest.mark.ort


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 17 * len(shape)))


def ids(high: int, *shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high)).to(kind)


CASES: dict[str, tuple[str, list[torch.Tensor | None], dict[str, Any], int]] = {
    "gelu": ("Gelu", [normal(3, 4)], {}, 1),
    "quick_gelu": ("QuickGelu", [normal(3, 4)], {"alpha": 1.5}, 1),
    "fast_gelu": ("FastGelu", [normal(3, 4), normal(4)], {}, 1),
    "bias_gelu": ("BiasGelu", [normal(3, 4), normal(4)], {}, 1),
    "skip_layer_norm": (
        "SkipLayerNormalization",
        [normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(8), normal(8)],
        {"epsilon": 1e-5},
        1,
    ),
    "skip_simplified": ("SkipSimplifiedLayerNormalization", [normal(2, 3, 8), normal(2, 3, 8), normal(8)], {"epsilon": 1e-5}, 1),
    "embed_layer_norm": (
        "EmbedLayerNormalization",
        [ids(20, 2, 5), ids(2, 2, 5), normal(20, 8), normal(6, 8), normal(2, 8), normal(8), normal(8), ids(2, 2, 5)],
        {"epsilon": 1e-5},
        2,
    ),
    "fused_matmul": ("FusedMatMul", [normal(2, 4, 3), normal(2, 5, 4)], {"alpha": 0.5, "transA": 1, "transB": 1}, 1),
    "fused_matmul_batch": ("FusedMatMul", [normal(4, 2, 3), normal(2, 3, 5)], {"transBatchA": 1}, 1),
    "fused_conv": ("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3)], {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1),
    "rotary": ("RotaryEmbedding", [normal(2, 5, 16), ids(6, 2, 5, kind=torch.int64), normal(6, 4), normal(6, 4)], {"num_heads": 2}, 1),
    "rotary_interleaved": (
        "RotaryEmbedding",
        [normal(2, 3, 5, 8), torch.tensor([1]), normal(6, 4), normal(6, 4)],
        {"interleaved": 1},
        1,
    ),
    "multi_head_attention": (
        "MultiHeadAttention",
        [normal(2, 5, 16), normal(2, 7, 16) * 0.5, normal(2, 7, 16) + 1, normal(48), None, normal(2, 2, 5, 7)],
        {"num_heads": 2},
        1,
    ),
    "attention": ("Attention", [normal(2, 5, 8), normal(8, 24), normal(24)], {"num_heads": 2}, 1),
    "causal_attention": ("Attention", [normal(2, 5, 8), normal(8, 24), normal(24)], {"num_heads": 2, "unidirectional": 1}, 1),
    "inverse": ("Inverse", [normal(3, 3) + 3 * torch.eye(3)], {}, 1),
    "softmax_cross_entropy": (
        "SoftmaxCrossEntropyLossInternal",
        [normal(6, 5), ids(5, 6, kind=torch.int64), normal(5).abs(), torch.tensor(2)],
        {"reduction": "mean"},
        2,
    ),
    "concat_training": ("ConcatTraining", [normal(2, 3), normal(2, 4)], {"axis": 1}, 2),
    "batch_norm": ("BatchNormInternal", [normal(4, 3, 5), normal(3), normal(3), torch.zeros(3), torch.ones(3)], {"momentum": 0.9}, 1),
    "lstm": ("LSTMTraining", [normal(5, 2, 3), normal(1, 16, 3), normal(1, 16, 4), normal(1, 32)], {"hidden_size": 4}, 3),
    "gru": (
        "GRUTraining",
        [normal(5, 2, 3), normal(1, 12, 3), normal(1, 12, 4), normal(1, 24)],
        {"hidden_size": 4, "linear_before_reset": 1},
        2,
    ),
}
MORE_OUTPUTS = {"BatchNormInternal": 5, "LSTMTraining": 5, "GRUTraining": 3}
"""How many outputs ORT's kernel insists on."""


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    import onnxruntime

    operator, inputs, attributes, outputs = CASES[name]
    names = [f"i{place}" if value is not None else "" for place, value in enumerate(inputs)]
    results = [f"o{place}" for place in range(MORE_OUTPUTS.get(operator, outputs))]
    node = helper.make_node(operator, names, results, domain="com.microsoft", **attributes)
    numbers = {torch.float32: 1, torch.int32: 6, torch.int64: 7}
    given = {key: value for key, value in zip(names, inputs, strict=True) if value is not None}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(key, numbers[value.dtype], list(value.shape)) for key, value in given.items()],
        [onnx.ValueInfoProto(name=key) for key in results[:outputs]],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(results[:outputs], {key: value.numpy().copy() for key, value in given.items()})
    translation = translate(model, outputs=results[:outputs])
    found = translation.module(*(given[key].clone() for key in translation.inputs))
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, torch.from_numpy(np.asarray(reference)), rtol=2e-4, atol=2e-5)

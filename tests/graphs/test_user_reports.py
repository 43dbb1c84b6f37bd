"""Models that users could not make artifacts of with ONNX Runtime's own tools, named after their reports.

Small modules in the spirit of theirs: what matters is the operator that failed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.graphs.parity import assert_trains_like

pytestmark = pytest.mark.ort


class DistilBert(nn.Module):
    """Embeddings, attention with a padding mask, GELU: what `AutoModel` gives for distilbert."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(30, 8, padding_idx=0), nn.Embedding(12, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm1, self.fc1, self.fc2, self.norm2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device)))
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mask = attention_mask[:, None, None, :].to(torch.bool)
        x = self.norm1(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


def test_onnxruntime_22465_distilbert_with_a_mask_and_mse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = DistilBert()
    batches = []
    for size in (2, 3):
        mask = torch.ones(size, 6, dtype=torch.int64)
        mask[0, 4:] = 0
        batches.append((torch.randint(1, 30, (size, 6)), mask, torch.randn(size, 6, 8)))
    made = toc.export_artifacts(net, batches[0][:2], tmp_path / "made", "mse")
    assert_trains_like(made, net, batches, lambda m, ids, mask, y: F.mse_loss(m(ids, mask), y), tmp_path)


class UNet(nn.Module):
    """Down, up by interpolation, and joined with what was before."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.down, self.middle, self.end = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(7, 2, 1)
        self.up = nn.Upsample(scale_factor=2, mode=mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(torch.cat([x, self.up(torch.relu(self.middle(torch.relu(self.down(x)))))], 1))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_onnxruntime_16866_resize_in_a_unet(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = UNet(mode)
    batches = [(torch.randn(size, 3, 6, 6), torch.randint(0, 2, (size, 6, 6))) for size in (2, 3)]
    made = toc.export_artifacts(net, batches[0][:1], tmp_path / "made", class_axis=1)
    assert_trains_like(made, net, batches, lambda m, x, y: F.cross_entropy(m(x), y), tmp_path)


def test_onnxruntime_19351_an_operator_set_that_the_runtime_has_kernels_for(tmp_path: Path) -> None:
    """Their graph had Shape(19), for which 1.17 has no kernel in training: ours has the lowest operator set that PyTorch writes."""
    made = toc.export_artifacts(DistilBert(), (torch.ones(2, 4, dtype=torch.int64),) * 2, tmp_path, "mse", for_ort="1.17")
    for model in (made.training, made.eval, made.optimizer):
        assert model is not None
        assert max(item.version for item in model.opset_import if item.domain == "") <= 18
        assert model.ir_version <= 9


class Ratio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.reciprocal(self.fc(x).square() + 0.5)


def test_training_examples_185_reciprocal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Ratio()
    batches = [(torch.randn(size, 4), torch.randn(size, 3)) for size in (2, 5)]
    made = toc.export_artifacts(net, batches[0][:1], tmp_path / "made", "mse")
    assert_trains_like(made, net, batches, lambda m, x, y: F.mse_loss(m(x), y), tmp_path)


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU, tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm1, self.norm2, self.norm = nn.Embedding(20, 8), nn.RMSNorm(8), nn.RMSNorm(8), nn.RMSNorm(8)
        self.q, self.kv, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.gate, self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 100.0 ** (torch.arange(2) / 2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        h = self.norm1(x)
        q = self.rotated(self.q(h).unflatten(-1, (2, 4)).transpose(1, 2))
        k, v = (part.unsqueeze(1) for part in self.kv(h).chunk(2, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, self.rotated(k), v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.norm(x) @ self.words.weight.T


def test_training_examples_203_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Llama()
    batches = [(torch.randint(0, 20, (size, 5)), torch.randint(0, 20, (size, 5))) for size in (2, 3)]
    made = toc.export_artifacts(net, batches[0][:1], tmp_path / "made", class_axis=-1)
    assert_trains_like(made, net, batches, lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y), tmp_path)


def onnx_model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], sizes: list[int | str], path: Path) -> Path:
    """A model from `x` to `y`."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "inference", values[:1], values[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_onnxruntime_21827_a_simplified_layer_normalization_in_an_optimized_model(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weights = {"scale": generator.random(4, np.float32), "w": generator.random((4, 4), np.float32)}
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["h"], axis=-1, epsilon=1e-5),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    path = onnx_model(nodes, weights, ["batch", 4], tmp_path / "model.onnx")
    made = toc.rebuild_artifacts(path, tmp_path / "made", "mse")
    assert set(made.trainable) == {"scale", "w"}

    class Native(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.w = (nn.Parameter(torch.tensor(value)) for value in weights.values())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, [4], self.scale, 1e-5) @ self.w

    batches = [(torch.randn(size, 4), torch.randn(size, 4)) for size in (2, 5)]
    assert_trains_like(made, Native(), batches, lambda m, x, y: F.mse_loss(m(x), y), tmp_path)


def test_onnxruntime_20781_weights_of_four_bits_are_refused_by_name(tmp_path: Path) -> None:
    packed = {"w": np.zeros((4, 1, 8), np.uint8), "scales": np.ones((4, 1), np.float32), "b": np.zeros(4, np.float32)}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "w", "scales"], ["h"], domain="com.microsoft", K=16, N=4, bits=4, block_size=16),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    path = onnx_model(nodes, packed, ["batch", 16], tmp_path / "model.onnx")
    with pytest.raises(toc.CheckpointError, match="MatMulNBits"):
        toc.rebuild_artifacts(path, tmp_path / "made", "mse")


def test_onnxruntime_13057_gradients_of_an_onnx_graph_without_a_training_build(tmp_path: Path) -> None:
    """c = a + b: both gradients are 1, in a graph of standard operators."""
    from torch_ort_ckpt.graphs.gradients.contract import joint_graph

    def total(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum()

    path = onnx_model([helper.make_node("Add", ["x", "b"], ["y"])], {"b": np.full(3, 2.0, np.float32)}, [3], tmp_path / "model.onnx")
    made = toc.rebuild_artifacts(path, tmp_path / "made", total)
    model = toc.OrtModule(made, engine="torch")
    model(torch.ones(3)).backward()
    assert torch.equal(model.b.grad, torch.ones(3))
    graph = joint_graph(made.training, ["x"]).model.graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}

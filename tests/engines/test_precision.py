"""The torch engine in other types than the graph's: against the module it was exported from, converted the same way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import parser
from torch import Tensor, nn

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES
from tests.truth import DATA
from torch_ort_ckpt.graphs.translation import translate
from torch_ort_ckpt.graphs.translation.precision import in_any_type

Exported = Callable[[str], tuple[Path, nn.Module]]
ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"
TYPES = [torch.bfloat16, torch.float16, torch.float64]
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float64: 1e-6}
"""Of the largest element: a few roundings, and for double precision the constants, which the graph holds in float32."""
NAMES = [
    "mlp",
    "activations",
    "mse",
    "bce",
    "weighted_loss",
    "cnn_bn",
    "conv_variants",
    "transformer",
    "rotary",
    "lstm",
    "gru",
    "shapes",
    "embedding",
]
LOSSES: dict[str | None, Any] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "bce": F.binary_cross_entropy_with_logits}


def converted(batch: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [value.to(dtype) if value.is_floating_point() else value for value in batch]


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 0.0) -> None:
    assert found.dtype is expected.dtype
    largest = max(float(expected.abs().max()), scale)
    assert float((found.double() - expected.double()).abs().max()) <= TOLERANCE[dtype] * largest + 1e-7


@pytest.mark.ort
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_the_module_in_the_same_type(name: str, dtype: torch.dtype, exported: Exported) -> None:
    if (name, dtype) == ("transformer", torch.float16):
        pytest.skip("PyTorch itself refuses the module's masked_fill(-1e9)")
    folder, module = exported(name)
    family = FAMILIES[name]
    model, native = toc.OrtModule(folder, engine="torch").to(dtype), copy.deepcopy(module).to(dtype)
    batch = converted(family.batch(3), dtype)

    def reference() -> Tensor:
        count = len(family.inputs())
        outputs = native(*batch[:count])
        return outputs if family.loss is None else LOSSES[family.loss](outputs, *batch[count:])

    loss, expected = model(*batch), reference()
    assert_near(loss, expected, dtype)
    for value in (loss, expected):
        value.backward()
    theirs = dict(native.named_parameters())
    scale = max(float(value.grad.abs().max()) for value in theirs.values()) * 0.1
    for key, parameter in model.named_trainable().items():
        assert parameter.grad is not None
        assert_near(parameter.grad, theirs[key].grad, dtype, scale)
    for key, value in native.named_buffers():
        if value.is_floating_point() and key in model.state_dict():  # BatchNorm's statistics
            assert_near(model.state_dict()[key], value, dtype, 0.1)
    model.zero_grad()
    gradients = {key: value.grad for key, value in theirs.items()}
    assert_near(model.train_step(*batch), expected, dtype)
    for key, parameter in model.named_trainable().items():
        assert_near(parameter.grad, gradients[key], dtype, scale)
    reference()  # the second run in training mode, for BatchNorm's statistics
    native.eval()
    assert_near(model.eval()(*batch), reference(), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_inputs_may_be_in_the_graph_s_type_or_in_the_model_s(dtype: torch.dtype) -> None:
    model = toc.OrtModule(ADAMW, engine="torch").to(dtype)
    x, labels = torch.randn(4, model.artifacts.inputs[0].shape[1]), torch.zeros(4, dtype=torch.int64)
    assert model(x.to(dtype), labels).item() == model(x, labels).item()
    if dtype is torch.float64:  # and a double is not rounded on the way
        fine = x.double() + 1e-12
        assert model(fine, labels).item() != model(x, labels).item()
    assert model.float()(x, labels).dtype is torch.float32


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", ["torch", "graph"])
def test_optimizers_train_it_and_its_checkpoint_goes_on(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def made() -> tuple[toc.OrtModule, Any]:
        model = toc.OrtModule(ADAMW, engine="torch").to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.5) if kind == "torch" else toc.OrtOptimizer(model, lr=0.05)

    def train(model: toc.OrtModule, optimizer: Any, steps: int) -> float:
        for _ in range(steps):
            loss = model(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    torch.manual_seed(0)
    model, optimizer = made()
    x, labels = torch.randn(8, model.artifacts.inputs[0].shape[1]), torch.arange(8) % 2
    first = train(model, optimizer, 1)
    toc.save(model.checkpoint(optimizer if kind == "graph" else None), tmp_path / "checkpoint")
    states = model.state_dict()
    again, other = made()
    again.load_checkpoint(tmp_path / "checkpoint", other if kind == "graph" else None)
    assert all(torch.equal(value, states[name]) for name, value in again.state_dict().items())
    assert train(model, optimizer, 10) < 0.8 * first
    if kind == "graph":
        train(again, other, 10)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_what_is_made_of_integers_is_not_rounded_before_it_must_be() -> None:
    """Positions of a long sequence: bfloat16 can't represent odd numbers above 256."""
    text = """agraph (float[n] x, int64[n] places) => (float[n] y)
    <float rate = {0.001}>
    { numbers = Cast<to = 1>(places)  angles = Mul(numbers, rate)  waves = Sin(angles)  y = Mul(x, waves) }"""
    module = in_any_type(translate(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')).module)
    places = torch.arange(4000)
    (y,) = module(torch.ones(4000, dtype=torch.bfloat16), places)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, (places * 0.001).sin().bfloat16())


def test_a_mask_beyond_the_range_of_half_precision_stays_finite() -> None:
    text = """agraph (float[n, k] x, bool[k] hidden) => (float[n, k] y)
    <float low = {-3.4028235e38}, float[1] zero = {0.0}>
    { bias = Where(hidden, low, zero)  scores = Add(x, bias)  y = Softmax(scores) }"""
    module = in_any_type(translate(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')).module)
    (y,) = module(torch.zeros(1, 3, dtype=torch.float16), torch.tensor([True, True, True]))
    torch.testing.assert_close(y, torch.full((1, 3), 1 / 3, dtype=torch.float16))


def test_branches_and_sequences_are_converted_too(tmp_path: Path) -> None:
    text = """agraph (float[n, 2] x, float[2] w) => (float[m, 2] y)
    <int64 zero = {0}, int64 three = {3}, float[2, 2] rows = {1.0, 2.0, 3.0, 4.0}>
    {
        shape = Shape(x)  n = Gather(shape, zero)  large = Greater(n, three)
        scaled = If (large) <
            then_branch = g1 () => (float[n, 2] a) { moved = Sub(x, w)  a = Add(moved, w) },
            else_branch = g2 () => (float[n, 2] b) { part = Mul(x, w)  product = MatMul(part, rows)  b = Add(product, w) }
        >
        y = Concat<axis = 0>(scaled, rows)
    }"""
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}'), tmp_path / "eval_model.onnx")
    artifacts = toc.Artifacts.load(tmp_path, checkpoint=toc.CheckpointState(frozen={"w": torch.tensor([2.0, 0.5])}))
    model = toc.OrtModule(artifacts, engine="torch").eval().bfloat16()
    rows, w = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(), torch.tensor([2.0, 0.5]).bfloat16()
    for count in (2, 5):
        x = torch.randn(count, 2).bfloat16()
        expected = x - w + w if count > 3 else (x * w) @ rows + w
        assert torch.equal(model(x), torch.cat([expected, rows]))


@pytest.mark.ort
def test_a_transformer_whose_mask_is_too_large_for_half_precision(exported: Exported) -> None:
    folder, _ = exported("transformer")
    batch = FAMILIES["transformer"].batch(3)
    expected = toc.OrtModule(folder, engine="torch")(*batch)
    loss = toc.OrtModule(folder, engine="torch").half()(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected.half(), rtol=1e-2, atol=1e-3)


@pytest.mark.ort
def test_running_statistics_in_float32_are_updated_in_place(exported: Exported) -> None:
    """What FSDP2's mixed precision makes of a model: parameters in bfloat16, buffers as they were."""
    folder, module = exported("cnn_bn")
    model, native = toc.OrtModule(folder, engine="torch"), copy.deepcopy(module)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    batch = FAMILIES["cnn_bn"].batch(3)
    loss = model(*batch)
    loss.backward()
    native(batch[0])
    assert loss.dtype is torch.bfloat16
    statistics = {name: value for name, value in native.named_buffers() if value.is_floating_point()}
    assert statistics
    for name, value in statistics.items():
        found = model.get_buffer(name)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, value, rtol=2e-2, atol=1e-3)


def test_compiled_graphs_follow_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # Inductor would take a minute
    model = toc.OrtModule(ADAMW, engine="torch", compile=True)
    plain = toc.OrtModule(ADAMW, engine="torch")
    x, labels = torch.randn(4, model.artifacts.inputs[0].shape[1]), torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        losses = [module.to(dtype)(x, labels) for module in (model, plain)]
        for loss in losses:
            loss.backward()
        assert losses[0].dtype is dtype
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=1e-3)
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, rtol=5e-2, atol=1e-2)
        model.zero_grad()
        plain.zero_grad()

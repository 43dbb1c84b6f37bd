"""The torch engine is ordinary PyTorch: what works on a module works on it."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES, Family, Transformer, export, labels
from tests.truth import DATA

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools

Exported = Callable[[str], tuple[Path, nn.Module]]


@pytest.fixture
def model(exported: Exported) -> toc.OrtModule:
    return toc.OrtModule(exported("transformer")[0], engine="torch")


@pytest.fixture
def batch() -> list[torch.Tensor]:
    return FAMILIES["transformer"].batch(3)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def reference(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("name", ["mlp", "cnn_bn", "transformer", "rotary", "lstm", "gru", "shapes", "avg_pools", "weighted_loss"])
def test_compile_makes_one_graph(name: str, exported: Exported) -> None:
    model = toc.OrtModule(exported(name)[0], engine="torch")
    batch = FAMILIES[name].batch(3)
    loss, expected = reference(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(*batch)
    result.backward()
    torch.testing.assert_close(result.detach(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_compile_follows_a_changing_batch_size_without_tracing_each(exported: Exported) -> None:
    model = toc.OrtModule(exported("mlp")[0], engine="torch")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch._dynamo.utils.counters.clear()
    for size in (4, 6, 9, 12):
        batch = [torch.randn(size, 6), torch.randint(0, 5, (size,))]
        torch.testing.assert_close(compiled(*batch), model(*batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the first size, then any


def test_the_compile_option_trains(exported: Exported) -> None:
    folder, _ = exported("mlp")
    batch = FAMILIES["mlp"].batch(3)
    loss, expected = reference(toc.OrtModule(folder, engine="torch"), batch)
    model = toc.OrtModule(folder, engine="torch", compile=True)
    found, compiled = reference(model, batch)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.train_step(*batch), loss)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)


def test_the_compile_option_is_ordinary_autograd(exported: Exported) -> None:
    folder, _ = exported("mlp")
    batch = FAMILIES["mlp"].batch(3)
    _, expected = reference(toc.OrtModule(folder, engine="torch"), batch)
    model = toc.OrtModule(folder, engine="torch", compile=True)
    frozen, *trained = expected
    model.get_parameter(frozen).requires_grad_(False)
    first, second = model(*batch), model(*batch)
    (first * 3).backward()
    second.backward(retain_graph=True)
    second.backward()
    assert model.get_parameter(frozen).grad is None
    found = {name: value / 5 for name, value in gradients(model).items()}
    torch.testing.assert_close(found, {name: expected[name] for name in trained}, rtol=1e-5, atol=1e-6)
    with pytest.raises((toc.CheckpointError, RuntimeError), match="second time"):
        second.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(*batch).item() != second.item()
    x = batch[0].clone().requires_grad_()
    model(x, *batch[1:]).backward()  # a gradient of the input too
    assert x.grad is not None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not model(*batch).requires_grad


class Shared(nn.Module):
    """One value is the gradient of two parameters, and one gradient is the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(3, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b + self.c * x).sum()


@pytest.mark.ort
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_step_may_be_changed_in_place(tmp_path: Path, compiled: bool) -> None:
    x = torch.randn(3, 4)
    toc.export_artifacts(Shared(), (x,), tmp_path, loss=None, exporter="torchscript")
    model = toc.OrtModule(tmp_path, engine="torch", compile=compiled)
    batch = x.clone()
    for _ in range(2):
        model.train_step(batch)
    found = gradients(model)
    torch.testing.assert_close(found, {"a": torch.full((3, 4), 2.0), "b": torch.full((3, 4), 2.0), "c": 2 * x})
    for value in model.parameters():
        assert value.grad is not None
        value.grad.mul_(10)
    assert torch.equal(batch, x)
    torch.testing.assert_close(model.get_parameter("a").grad, torch.full((3, 4), 20.0))


def test_autocast(model: toc.OrtModule, batch: list[torch.Tensor]) -> None:
    loss, expected = reference(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(*batch)
    result.backward()
    assert result.item() != loss.item()
    torch.testing.assert_close(result.detach().float(), loss, rtol=1e-2, atol=1e-2)
    for name, value in gradients(model).items():
        assert value.dtype == torch.float32
        assert float((value - expected[name]).norm()) <= 0.05 * float(expected[name].norm()) + 1e-3


def test_activation_checkpointing_with_dropout(tmp_path: Path) -> None:
    family = Family(
        lambda: Transformer(1, dropout=0.3), lambda: (torch.randint(0, 50, (2, 7)),), target=lambda: torch.randint(0, 50, (14,))
    )
    export(family, tmp_path)
    model, batch = toc.OrtModule(tmp_path, engine="torch"), family.batch(3)
    torch.manual_seed(5)
    loss, expected = reference(model, batch)
    torch.manual_seed(5)
    result = checkpoint(model, *batch, use_reentrant=False)
    result.backward()
    assert result.item() == loss.item()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    assert model(*batch).item() != loss.item()  # dropout draws anew


def test_functional_transforms(model: toc.OrtModule, batch: list[torch.Tensor], exported: Exported) -> None:
    _, expected = reference(model, batch)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, values, tuple(batch))

    found = grad(loss)(parameters)
    torch.testing.assert_close({name: found[name] for name in expected}, expected)
    directions = {name: torch.randn_like(value) for name, value in parameters.items()}
    _, slope = jvp(loss, (parameters,), (directions,))
    torch.testing.assert_close(slope, sum((expected[name] * directions[name]).sum() for name in expected), rtol=1e-4, atol=1e-5)


def test_gradients_per_sample(exported: Exported) -> None:
    model, batch = toc.OrtModule(exported("mlp")[0], engine="torch"), FAMILIES["mlp"].batch(3)
    _, expected = reference(model, batch)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def one(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (x[None], y[None]))

    each = vmap(grad(one), in_dims=(None, 0, 0))(parameters, *batch)
    torch.testing.assert_close({name: each[name].mean(0) for name in expected}, expected)


def test_double_backward(exported: Exported) -> None:
    folder, native = exported("mlp")
    native = copy.deepcopy(native)
    batch = FAMILIES["mlp"].batch(3)
    model = toc.OrtModule(folder, engine="torch")

    def penalty(loss: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), parameters)

    names = [name for name, _ in native.named_parameters()]
    found = penalty(model(*batch), [model.get_parameter(name) for name in names])
    expected = penalty(nn.functional.cross_entropy(native(batch[0]), batch[1]), [native.get_parameter(name) for name in names])
    torch.testing.assert_close(found, expected)


def test_gradients_reach_the_inputs(exported: Exported) -> None:
    folder, native = exported("mlp")
    inputs, targets = FAMILIES["mlp"].batch(3)
    both = [inputs.clone().requires_grad_() for _ in range(2)]
    toc.OrtModule(folder, engine="torch")(both[0], targets).backward()
    nn.functional.cross_entropy(copy.deepcopy(native)(both[1]), targets).backward()
    torch.testing.assert_close(both[0].grad, both[1].grad)


def test_export(model: toc.OrtModule, batch: list[torch.Tensor]) -> None:
    program = torch.export.export(model, tuple(batch))
    torch.testing.assert_close(program.module()(*batch), model(*batch))
    assert set(program.graph_signature.parameters) == {name for name, _ in model.named_parameters()}


def test_export_with_a_dynamic_batch(exported: Exported) -> None:
    model, batch = toc.OrtModule(exported("mlp")[0], engine="torch"), FAMILIES["mlp"].batch(3)
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(model, tuple(batch), dynamic_shapes={"input0": {0: size}, "labels": {0: size}})
    larger = [torch.cat([value, value, value]) for value in batch]
    torch.testing.assert_close(program.module()(*larger), model(*larger))


def test_copies_and_pickles(model: toc.OrtModule, batch: list[torch.Tensor]) -> None:
    loss, _ = reference(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(*batch).item() == loss.item()


def test_train_step_is_backward_without_autograd(model: toc.OrtModule, batch: list[torch.Tensor]) -> None:
    loss, expected = reference(model, batch)
    assert model.train_step(*batch).item() == loss.item()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


def test_dropout_is_torch_s(tmp_path: Path) -> None:
    family = Family(
        lambda: nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 5)), lambda: (torch.randn(4, 6),), target=labels()
    )
    export(family, tmp_path)
    model, batch = toc.OrtModule(tmp_path, engine="torch"), family.batch(1)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(*batch).item())
    assert losses[0] == losses[1] != losses[2]
    assert model.eval()(*batch).item() == model(*batch).item()


def test_auto_takes_ort_where_it_can_and_says_which(exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_ort_ckpt"):
        assert toc.OrtModule(exported("mlp")[0]).engine.name == "ort"
    assert "engine: ort" in caplog.text


WITHOUT_ORT = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnxruntime", "h5py"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("onnxruntime") else real(name, *rest)
import torch
import torch_ort_ckpt as toc
model = toc.OrtModule({str(DATA / "fbv2_ort1_19_2_adamw_full")!r})
assert model.engine.name == "torch", model.engine.name
optimizer = toc.OrtOptimizer(model, lr=1e-2)
shapes = [[4 if isinstance(size, str) else size for size in spec.shape] for spec in model.artifacts.inputs]
batch = [torch.randn(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64)]
losses = []
for _ in range(5):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]
assert not any(name.partition(".")[0] == "onnxruntime" for name in sys.modules)
print("trained")
"""


def test_it_trains_where_onnxruntime_is_not_installed() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_ORT], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "trained", result.stderr[-2000:]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["mlp", "cnn_bn", "transformer"])
def test_moving_the_model_is_all_that_a_gpu_needs(name: str, exported: Exported) -> None:
    model, batch = toc.OrtModule(exported(name)[0], engine="torch"), FAMILIES[name].batch(3)
    loss, expected = reference(model, batch)
    model.to("cuda")
    found, moved = reference(model, [value.cuda() for value in batch])
    torch.testing.assert_close(found.cpu(), loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close({key: value.cpu() for key, value in moved.items()}, expected, rtol=1e-3, atol=1e-4)

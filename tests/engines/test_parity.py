"""The parity matrix: every model family, the torch engine against ONNX Runtime's and against the module it was exported from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES, export
from tests.official import artifact_folders, batches
from tests.truth import DATA
from torch_ort_ckpt.graphs.translation import translate

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools

Exported = Callable[[str], tuple[Path, nn.Module]]
TRAINED_BY_ORT = [name for name, family in FAMILIES.items() if family.ort]


def assert_gradients(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """Within 1e-5 of each tensor's largest element. A gradient that is zero but for rounding (a bias before BatchNorm) has no
    meaningful scale of its own: there it is 1e-6 of the model's largest."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values() if value is not None)
    for name, value in expected.items():
        other = found[name]
        assert value is not None
        assert other is not None
        assert float((value - other).abs().max()) <= 1e-5 * float(value.abs().max()) + 1e-6 * largest, name


@pytest.mark.parametrize("name", TRAINED_BY_ORT)
def test_loss_gradients_statistics_and_evaluation_are_those_of_the_ort_engine(name: str, exported: Exported) -> None:
    artifacts = toc.Artifacts.load(exported(name)[0])
    batch = FAMILIES[name].batch(3)
    ours, ort = toc.OrtModule(artifacts, engine="torch"), toc.OrtModule(artifacts, engine="ort", threads=1)
    losses = [model(*batch) for model in (ours, ort)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert_gradients(*({n: p.grad for n, p in model.named_trainable().items()} for model in (ours, ort)))
    for key, value in ort.state_dict().items():  # BatchNorm's statistics among them
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.eval()(*batch), ort.eval()(*batch), rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", TRAINED_BY_ORT)
def test_a_checkpoint_of_one_engine_goes_on_under_the_other(name: str, exported: Exported, tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(exported(name)[0])
    steps = [FAMILIES[name].batch(seed) for seed in range(6)]

    def train(model: toc.OrtModule, optimizer: toc.OrtOptimizer, data: list[list[Tensor]]) -> None:
        for batch in data:
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()

    whole = toc.OrtModule(artifacts, engine="ort", threads=1)
    train(whole, toc.OrtOptimizer(whole, lr=1e-3), steps)

    parts = [toc.OrtModule(artifacts, engine=engine) for engine in ("torch", "ort", "torch")]
    for number, model in enumerate(parts):
        optimizer = toc.OrtOptimizer(model, lr=1e-3)
        if number:
            model.load_checkpoint(tmp_path / str(number - 1), optimizer)
        train(model, optimizer, steps[2 * number : 2 * number + 2])
        toc.save(model.checkpoint(optimizer), tmp_path / str(number))
    expected = whole.checkpoint()
    found = toc.load(tmp_path / "2")
    assert found.optimizer["group0"].step == 6
    assert found.parameters.keys() == expected.parameters.keys()
    for key, value in expected.parameters.items():
        # Adam divides each gradient by its own size: an element whose gradient is only rounding may step either way.
        difference = (found.parameters[key].float() - value.float()).abs()
        assert float(difference.median() if difference.numel() else 0) <= 1e-5
        assert float(difference.max() if difference.numel() else 0) <= 2 * 6 * 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_exported_model_computes_what_the_module_computes(name: str, exported: Exported) -> None:
    folder, module = exported(name)
    check_against_module(onnx.load(folder / "model.onnx"), copy.deepcopy(module), name)


@pytest.mark.parametrize("name", ["conv_variants", "lstm", "transformer"])
def test_so_does_what_the_new_exporter_writes(name: str, tmp_path: Path) -> None:
    module = export(FAMILIES[name], tmp_path, dynamo=True, artifacts=False)
    check_against_module(onnx.load(tmp_path / "model.onnx"), module, name)


def check_against_module(model: onnx.ModelProto, module: nn.Module, name: str) -> None:
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    translation = translate(model, parameters=[*parameters, *buffers])
    assert parameters.keys() <= set(translation.parameters)
    inputs = FAMILIES[name].batch(3)[: len(translation.inputs)]
    values = [parameters[key] if key in parameters else buffers[key].clone() for key in translation.parameters]
    (found,), expected = translation.module(*inputs, *values), module(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad((result * direction).sum(), list(parameters.values())) for result in (found, expected)]
    assert_gradients(*(dict(zip(parameters, values, strict=True)) for values in gradients))


@pytest.mark.parametrize(
    ("name", "axes", "larger"),
    [
        ("transformer", (0,), lambda: [torch.randint(0, 50, (5, 7)), torch.randint(0, 50, (35,))]),
        ("shapes", (0, 1), lambda: [torch.randn(6, 5, 6), torch.randint(0, 5, (6,))]),
        ("lstm", (0, 1), lambda: [torch.randn(9, 3, 6), torch.randint(0, 5, (3,))]),
    ],
)
def test_open_dimensions(name: str, axes: tuple[int, ...], larger: Callable[[], list[Tensor]], tmp_path: Path) -> None:
    export(dataclasses.replace(FAMILIES[name], dynamic=axes), tmp_path)
    artifacts = toc.Artifacts.load(tmp_path)
    ours, ort = toc.OrtModule(artifacts, engine="torch"), toc.OrtModule(artifacts, engine="ort", threads=1)
    for batch in (FAMILIES[name].batch(3), larger()):
        for model in (ours, ort):
            model.zero_grad()
            model(*batch).backward()
        assert_gradients(*({n: p.grad for n, p in model.named_trainable().items()} for model in (ours, ort)))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(*batch), ours(*batch), rtol=1e-5, atol=1e-6)


def test_batch_norm_s_statistics_are_pytorch_s(exported: Exported) -> None:
    folder, native = exported("cnn_bn")
    native = copy.deepcopy(native)
    model = toc.OrtModule(toc.Artifacts.load(folder), engine="torch")
    for seed in range(3):
        batch = FAMILIES["cnn_bn"].batch(seed)
        model(*batch)
        native(batch[0])
    statistics = {key: value for key, value in native.state_dict().items() if "running" in key}
    assert len(statistics) == 4
    for key, value in statistics.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", artifact_folders())
def test_real_artifacts_of_every_release_train_alike(name: str) -> None:
    complete = DATA / name / "complete_checkpoint"
    artifacts = toc.Artifacts.load(DATA / name, checkpoint=complete if complete.exists() else None)
    ours, ort = toc.OrtModule(artifacts, engine="torch"), toc.OrtModule(artifacts, engine="ort", threads=1)
    (batch,) = batches(artifacts, 1)
    losses = [model(*batch) for model in (ours, ort)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert_gradients(*({n: p.grad for n, p in model.named_trainable().items()} for model in (ours, ort)))
    torch.testing.assert_close(ours.eval()(*batch), ort.eval()(*batch), rtol=1e-5, atol=1e-6)

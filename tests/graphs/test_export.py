"""`export_artifacts`: modules of many kinds become artifacts that ORT trains as PyTorch would."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import CLASSES, MLP, MODELS, batch, exported, module
from tests.official import Official, assert_same

pytestmark = pytest.mark.ort

KINDS = [(name, "torchscript") for name in MODELS] + [(name, "dynamo") for name in ("cnn", "transformer", "groupnorm", "tied")]


def make(folder: Path, source: nn.Module | None = None, **options: object) -> toc.Artifacts:
    options = {"exporter": "torchscript", "overwrite": True} | options
    return toc.export_artifacts(source or module("mlp"), (batch("mlp")[0],), folder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "exporter"), KINDS)
def test_twenty_steps_equal_the_official_api_and_pytorch(name: str, exporter: str, tmp_path: Path) -> None:
    import onnxruntime

    artifacts = exported(name, exporter)
    model, native, official = toc.OrtModule(artifacts, threads=1, seed=3), module(name), Official(artifacts, tmp_path)
    optimizer = toc.OrtOptimizer(model, lr=1e-3)
    native_optimizer = torch.optim.AdamW(native.parameters(), lr=1e-3)
    seeds = toc.OrtModule(artifacts, seed=3)
    for step in range(20):
        x, y = batch(name, size=4 + step % 2, seed=step)
        if artifacts.random:
            onnxruntime.set_seed(seeds._next_seed())
        expected = official.loss(x, y)
        loss = model(x, y)
        loss.backward()
        assert_same(loss, expected)
        for parameter_name, gradient in official.gradients():
            assert_same(model.get_parameter(parameter_name).grad, gradient)
        official.optimizer.step()
        official.module.lazy_reset_grad()
        optimizer.step()
        optimizer.zero_grad()
        native_loss = F.cross_entropy(native(x), y)
        native_loss.backward()
        native_optimizer.step()
        native_optimizer.zero_grad()
        if not artifacts.random:
            assert loss.item() == pytest.approx(native_loss.item(), rel=1e-3, abs=1e-4)
    for parameter_name, value in official.parameters():
        if not parameter_name.endswith(("running_var", "num_batches_tracked")):
            assert_same(model.named_tensors()[parameter_name], value)


@pytest.mark.parametrize(("name", "exporter"), KINDS)
def test_names_and_values_are_the_module_s(name: str, exporter: str) -> None:
    native, model = module(name), toc.OrtModule(exported(name, exporter))
    assert dict(model.named_parameters()).keys() == dict(native.named_parameters()).keys()
    assert dict(model.named_buffers()).keys() == dict(native.named_buffers()).keys()
    for key, value in [*native.named_parameters(), *native.named_buffers()]:
        assert_same(model.named_tensors()[key], value)


def test_exporting_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    native = module("cnn").eval()
    before = {name: value.clone() for name, value in native.state_dict().items()}
    toc.export_artifacts(native, (batch("cnn")[0],), tmp_path, exporter="torchscript")
    assert not native.training
    assert all(torch.equal(value, before[name]) for name, value in native.state_dict().items())


@pytest.mark.parametrize(
    ("loss", "function", "target"),
    [
        ("mse", F.mse_loss, torch.rand(4, CLASSES)),
        ("l1", F.l1_loss, torch.rand(4, CLASSES)),
        ("bce_with_logits", F.binary_cross_entropy_with_logits, torch.rand(4, CLASSES).round()),
    ],
)
def test_losses(loss: str, function: object, target: torch.Tensor, tmp_path: Path) -> None:
    model = toc.OrtModule(make(tmp_path, loss=loss), threads=1)
    x, native = batch("mlp")[0], module("mlp")
    expected = function(native(x), target)  # type: ignore[operator]
    expected.backward()
    found = model(x, target)
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_a_loss_built_by_the_user(tmp_path: Path) -> None:
    from onnxruntime.training import onnxblock

    class Scaled(onnxblock.Block):
        def __init__(self) -> None:
            super().__init__()
            self.loss = onnxblock.loss.CrossEntropyLoss()
            self.factor, self.multiply = onnxblock.blocks.Constant(3.0), onnxblock.blocks.Mul()

        def build(self, scores: str) -> str:
            return self.multiply(self.loss(scores), self.factor())

    x, y = batch("mlp")
    model, native = toc.OrtModule(make(tmp_path / "block", loss=Scaled())), module("mlp")
    found, expected = model(x, y), 3 * F.cross_entropy(native(x), y)
    torch.testing.assert_close(found.reshape(()), expected)
    (found / 3).backward()
    (expected / 3).backward()
    torch.testing.assert_close(model.fc1.weight.grad, native.fc1.weight.grad)

    class Penalised(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    native = Penalised()
    found = toc.OrtModule(make(tmp_path / "inside", native, loss=None))(x)
    torch.testing.assert_close(found, native(x))


def test_optimizers_with_hyper_parameters_and_clipping(tmp_path: Path) -> None:
    spec = toc.OptimizerSpec("AdamW", betas=(0.8, 0.99), eps=1e-5, weight_decay=0.2, adam_mode=1, max_norm=0.5)
    assert make(tmp_path, optimizer=spec).optimizer_spec == spec
    native = module("mlp")
    adamw = torch.optim.AdamW(native.parameters(), betas=(0.7, 0.9), eps=1e-7, weight_decay=0.3)
    found = make(tmp_path, optimizer=adamw).optimizer_spec
    assert (found.betas, found.eps, found.weight_decay, found.adam_mode) == ((0.7, 0.9), 1e-7, 0.3, 0)
    assert make(tmp_path, optimizer="sgd").optimizer_spec.kind == "SGD"
    with pytest.raises(toc.CheckpointError, match="no momentum"):
        make(tmp_path, optimizer=torch.optim.SGD(native.parameters(), momentum=0.9))
    with pytest.raises(toc.CheckpointError, match="adagrad"):
        make(tmp_path, optimizer="adagrad")


def test_sgd_and_clipping_train_like_pytorch(tmp_path: Path) -> None:
    artifacts = make(tmp_path, optimizer=toc.OptimizerSpec("SGD", betas=(0.0, 0.0), eps=0.0, max_norm=0.1))
    model, native = toc.OrtModule(artifacts, threads=1), module("mlp")
    optimizer, plain = toc.OrtOptimizer(model, lr=0.5), torch.optim.SGD(native.parameters(), lr=0.5)
    for step in range(5):
        x, y = batch("mlp", seed=step)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(native(x), y).backward()
        nn.utils.clip_grad_norm_(native.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_frozen_parameters_by_pattern(tmp_path: Path) -> None:
    artifacts = make(tmp_path, frozen=["fc1.*"])
    assert artifacts.trainable == ["fc2.weight", "fc2.bias"]
    assert artifacts.state.frozen.keys() == {"fc1.weight", "fc1.bias"}
    model = toc.OrtModule(artifacts)
    model(*batch("mlp")).backward()
    assert model.fc1.weight.grad is None
    assert model.fc2.weight.grad is not None
    with pytest.raises(toc.CheckpointError, match="matches no parameter"):
        make(tmp_path, frozen=["encoder.*"])


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_extra_outputs_and_fixed_sizes(tmp_path: Path, exporter: str) -> None:
    artifacts = make(tmp_path, extra_outputs=True, dynamic_shapes={}, exporter=exporter)
    assert artifacts.dimensions == []
    assert [spec.name for spec in artifacts.outputs[1:]] == ["output"]
    x, y = batch("mlp")
    loss, logits = toc.OrtModule(artifacts)(x, y)
    assert loss.requires_grad
    assert not logits.requires_grad
    torch.testing.assert_close(logits, module("mlp")(x).detach())


def test_several_inputs_and_a_nominal_checkpoint(tmp_path: Path) -> None:
    class Two(MLP):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return super().forward(left * right)

    torch.manual_seed(0)
    native = Two()
    x, y = batch("mlp")
    artifacts = toc.export_artifacts(native, {"left": x, "right": x}, tmp_path, exporter="torchscript", prefix="two_", nominal=True)
    assert [spec.name for spec in artifacts.inputs] == ["left", "right", "labels"]
    model = toc.OrtModule(artifacts)
    torch.testing.assert_close(model(labels=y, right=x, left=x), F.cross_entropy(native(x, x), y))
    nominal = toc.Artifacts.load(tmp_path, checkpoint=tmp_path / "two_nominal_checkpoint")
    assert nominal.state.nominal
    assert nominal.prefix == "two_"


def test_the_older_exporter_steps_in_and_both_failing_is_explained(tmp_path: Path) -> None:
    class Branching(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max() > 1e6:  # only a tracer accepts this
                raise ValueError("too large")
            return super().forward(x)

    torch.manual_seed(0)
    stages: list[str] = []
    with pytest.raises(toc.CheckpointError, match=r"test_export.py:\d+: if x.abs\(\).max\(\) > 1e6"):
        toc.export_artifacts(Branching(), (batch("mlp")[0],), tmp_path)
    artifacts = toc.export_artifacts(Branching(), (batch("mlp")[0],), tmp_path, builder="ort", progress=stages.append)
    assert toc.OrtModule(artifacts)(*batch("mlp")).item() > 0
    assert any("dynamo exporter failed" in stage for stage in stages)
    assert stages[0] == "exporting the forward graph"
    assert stages[-1] == "writing the artifacts"

    class Impossible(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no forward today")

    with pytest.raises(toc.CheckpointError, match=r"dynamo: .*torchscript: .*no forward today"):
        toc.export_artifacts(Impossible(), (batch("mlp")[0],), tmp_path / "never", builder="ort")
    with pytest.raises(toc.CheckpointError, match=r"test_export.py:\d+: raise ValueError.*no forward today"):
        toc.export_artifacts(Impossible(), (batch("mlp")[0],), tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(("name", "exporter"), [("cnn", "dynamo"), ("transformer", "dynamo")])
def test_every_artifact_loads_in_ort_1_19(name: str, exporter: str) -> None:
    artifacts = exported(name, exporter)
    for path in (artifacts.training_path, artifacts.eval_path, artifacts.optimizer_path):
        assert onnx.load(path).ir_version <= 10


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="no loss 'hinge'"):
        make(tmp_path, loss="hinge")
    with pytest.raises(toc.CheckpointError, match="no exporter"):
        make(tmp_path, exporter="magic")
    with pytest.raises(toc.CheckpointError, match="no output 'logits'"):
        make(tmp_path, extra_outputs=["logits"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_stages_are_told_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    make(tmp_path)
    assert ("export: writing the artifacts" in screen.getvalue()) == terminal
    assert bool(screen.getvalue()) == terminal

"""A BatchNorm that is used several times updates its running statistics in the order in which the module calls it, on both engines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import torch_ort_ckpt as toc
from tests.official import Official
from torch_ort_ckpt.graphs.batch_norms import batch_norms

pytestmark = pytest.mark.ort

EXPORTERS = ["torchscript", "dynamo"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(self.bn(a) - self.bn(b))


class Thrice(nn.Module):
    """Called in an order that differs from that of the inputs and of the data flow; one use reads the result of another."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.other = nn.BatchNorm1d(6, momentum=0.3), nn.BatchNorm1d(6, momentum=0.3)
        self.first, self.fc = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        last = self.bn(b * 3 + 1)
        once = self.bn(self.first(a))
        beside = self.other(b) + self.other(a)
        twice = self.bn(torch.tanh(once) * 2)
        return self.fc(twice - last + beside)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator) * 2 + 1
    return a, b, torch.randint(0, 5, (4,), generator=generator)


Exported = Callable[[type[nn.Module], str], tuple[toc.Artifacts, nn.Module]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    made: dict[tuple[type[nn.Module], str], tuple[toc.Artifacts, nn.Module]] = {}

    def get(kind: type[nn.Module], exporter: str) -> tuple[toc.Artifacts, nn.Module]:
        if (kind, exporter) not in made:
            torch.manual_seed(0)
            module = kind()
            folder = tmp_path_factory.mktemp(kind.__name__)
            made[kind, exporter] = toc.export_artifacts(module, inputs(0)[:2], folder, exporter=exporter), module
        return made[kind, exporter]

    return get


def assert_statistics(found: dict[str, Tensor], native: nn.Module) -> None:
    expected = {name: value for name, value in native.state_dict().items() if "running" in name}
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", [Twice, Thrice])
@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_running_statistics_follow_the_order_of_the_calls(kind: type[nn.Module], exporter: str, engine: str, exported: Exported) -> None:
    artifacts, module = exported(kind, exporter)
    model, native = toc.OrtModule(artifacts, engine=engine), copy.deepcopy(module).train()
    for seed in range(3):
        a, b, labels = inputs(seed)
        loss = nn.functional.cross_entropy(native(a, b), labels)
        torch.testing.assert_close(model(a, b, labels), loss, rtol=1e-5, atol=1e-6)
        assert_statistics(model.state_dict(), native)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_ort_s_own_api_keeps_the_order_too(exporter: str, exported: Exported, tmp_path: Path) -> None:
    """It keeps the biased variance, but the means are PyTorch's: the exported graph itself has the order."""
    artifacts, module = exported(Thrice, exporter)
    official, native = Official(artifacts, tmp_path), copy.deepcopy(module).train()
    for seed in range(3):
        a, b, labels = inputs(seed)
        official.loss(a, b, labels)
        native(a, b)
    found = dict(official.parameters())
    for name in ("bn.running_mean", "other.running_mean"):
        torch.testing.assert_close(torch.from_numpy(found[name]), native.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_artifacts_that_do_not_say_so_take_it_from_the_eval_graph(engine: str, exported: Exported, tmp_path: Path) -> None:
    """As ORT's tools, and older releases of this library, write them."""
    artifacts, module = unchained(exported, "torchscript", tmp_path, evaluation=True)
    model, native = toc.OrtModule(artifacts, engine=engine), copy.deepcopy(module).train()
    model(*inputs(1))
    native(*inputs(1)[:2])
    assert_statistics(model.state_dict(), native)


def test_without_an_eval_graph_the_names_tell_and_a_warning_says_so(
    exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts, module = unchained(exported, "torchscript", tmp_path, evaluation=False)
    model, native = toc.OrtModule(artifacts, engine="torch"), copy.deepcopy(module).train()
    assert "bn.running_mean" in caplog.text
    model(*inputs(1))
    native(*inputs(1)[:2])
    assert_statistics(model.state_dict(), native)


def unchained(exported: Exported, exporter: str, folder: Path, *, evaluation: bool) -> tuple[toc.Artifacts, nn.Module]:
    """The artifacts with both uses of the BatchNorm reading the parameters themselves, the later one first."""
    made, module = exported(Twice, exporter)
    assert made.training_path is not None
    assert made.eval_path is not None
    model = onnx.load(made.training_path)
    norms = {norm.output: norm for norm in batch_norms(model)}
    assert len(norms) == 2
    for node in model.graph.node:
        if node.output[0] in norms:
            node.input[3], node.input[4] = norms[node.output[0]].mean, norms[node.output[0]].variance
    order = [name for node in onnx.load(made.eval_path).graph.node for name in node.output]
    first, second = (next(node for node in model.graph.node if node.output[0] == name) for name in sorted(norms, key=order.index))
    nodes = [node for node in model.graph.node if node is not second]
    nodes.insert(nodes.index(first), second)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, folder / "training_model.onnx")
    if evaluation:
        (folder / "eval_model.onnx").write_bytes(made.eval_path.read_bytes())
    return toc.Artifacts.load(folder, checkpoint=made.checkpoint_path), module


@pytest.mark.parametrize(
    ("layer", "words"),
    [(nn.BatchNorm1d(6, momentum=None), "momentum=None"), (nn.InstanceNorm1d(6, track_running_stats=True), "InstanceNorm")],
)
def test_statistics_that_ort_s_builder_can_not_keep_are_refused(layer: nn.Module, words: str, tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=f"^1: .*{words}"):
        toc.export_artifacts(nn.Sequential(nn.Linear(6, 6), layer), (torch.randn(4, 6),), tmp_path, builder="ort")

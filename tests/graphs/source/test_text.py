"""The source that `to_torch_module` writes: correct for any names in the graph, no ruff findings, with resolvable annotations."""

from __future__ import annotations

import importlib.util
import inspect
import math
import subprocess
import sys
import typing
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
from tests.engines.conftest import exported  # noqa: F401  # a fixture
from tests.truth import DATA
from torch_ort_ckpt.graphs.source.functions import Library
from torch_ort_ckpt.graphs.translation import registry

ROOT = Path(__file__).parents[3]
ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_clean(place: Path) -> None:
    """ruff with this project's rules finds nothing in the file or the folder's files, and every annotation resolves."""
    pytest.importorskip("ruff")
    for command in (["check", "--output-format", "concise"], ["format", "--diff"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(place)]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[:2000] + result.stderr[:500]
    files = sorted(place.glob("*.py")) if place.is_dir() else [place]
    assert files
    for file in files:
        written = load_module(file)
        found = [value for value in vars(written).values() if inspect.isfunction(value) and value.__module__ == "written"]
        if model := vars(written).get("Model"):
            found += [model, *(value for value in vars(model).values() if inspect.isfunction(value))]
        for value in found:
            typing.get_type_hints(value)


def assert_same(artifacts: toc.Artifacts, batch: tuple[Tensor, ...], source: Path) -> nn.Module:
    """The module computes what the torch engine does, forward and backward; the file alone gives the same module."""
    plain, model = toc.to_torch_module(artifacts, source=source), toc.OrtModule(artifacts, engine="torch")
    again = load_module(source).Model()
    again.load_state_dict(plain.state_dict())
    expected = model(*batch)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.backward()
    gradients = {name: value.grad for name, value in model.named_trainable().items()}
    for module in (plain, again):
        loss = module(*batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        assert loss.item() == expected.item()
        loss.backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=0)
    return plain


class Positions(nn.Module):
    """Where `device` is a keyword and an attribute, and shapes become numbers and tensors again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(16, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.arange(x.shape[0], device=x.device)[:, None, None]
        x = x + self.table[torch.arange(x.shape[1], device=x.device)]
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool).tril()
        scores = (x @ x.transpose(1, 2)) / math.sqrt(x.shape[-1])
        x = torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ x
        x = torch.cat([x, torch.zeros(x.shape[0], 1, x.shape[2], device=x.device)], 1)
        return self.head(x).mean(1)


class Sinusoids(nn.Module):
    """Tables computed in forward, masks from comparisons, one-hot, scatter and normalisation written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale, self.head = nn.Embedding(20, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angles = steps[:, None] / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float32, device=tokens.device) / 8)
        x = self.embedding(tokens) + torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        keep = (tokens != 0).to(x.dtype)[..., None]
        hot = F.one_hot(tokens % 8, 8).to(x.dtype)
        x = torch.where(keep > 0, x + hot * 0.5, torch.full_like(x, 0.25))
        x = torch.maximum(x, torch.zeros(1, device=x.device)) - F.relu(-x).clamp(max=3.0)
        return self.head((x * keep).sum(1) / keep.sum(1).clamp(min=1.0))


class Windows(nn.Module):
    """Convolution, padding, unfolding by hand, splits and joins of images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(F.pad(image, (1, 1, 1, 1), value=0.5)[:, :, 1:-1, 1:-1])))
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, channels)
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left.mean(1), right.sum(1)], -1)
        x = x.view(batch, -1, 2 * channels)[:, ::2].sum(1)
        return self.head(x)


SNIPPETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "positions": (Positions, lambda: torch.randn(3, 5, 8), "dynamo"),
    "positions_older": (Positions, lambda: torch.randn(3, 5, 8), "torchscript"),
    "sinusoids": (Sinusoids, lambda: torch.randint(0, 20, (3, 6)), "dynamo"),
    "windows": (Windows, lambda: torch.randn(2, 3, 8, 8), "torchscript"),
}


@pytest.mark.ort
@pytest.mark.parametrize("name", SNIPPETS)
def test_modules_as_people_write_them(name: str, tmp_path: Path) -> None:
    build, example, exporter = SNIPPETS[name]
    torch.manual_seed(0)
    module, x = build(), example()
    artifacts = toc.export_artifacts(module, (x,), tmp_path / "artifacts", exporter=exporter)
    labels = torch.randint(0, 4, (len(x),))
    plain = assert_same(artifacts, (x, labels), tmp_path / "model.py")
    torch.testing.assert_close(plain(x, labels), F.cross_entropy(module(x), labels), rtol=1e-5, atol=1e-6)
    assert_clean(tmp_path / "model.py")


@pytest.mark.ort
def test_the_source_of_every_family_is_clean(exported: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path) -> None:  # noqa: F811
    for name in ("cnn_bn", "transformer", "rotary", "lstm", "gru", "shapes", "weighted_loss"):
        toc.to_torch_module(exported(name)[0], source=tmp_path / f"{name}.py")
    assert_clean(tmp_path)


def test_every_operator_can_be_copied(tmp_path: Path) -> None:
    library = Library()
    functions = {
        op.function for versions in registry._OPS.values() for op in versions if op.function.__module__.startswith("torch_ort_ckpt")
    }
    names = [library.copy(function) for function in sorted(functions, key=lambda function: (function.__module__, function.__name__))]
    assert len(set(names)) == len(functions) > 150
    path = tmp_path / "operators.py"
    used = "USED = [nn.Module, torch.nn]"
    path.write_text(f'"""All of them."""\n\n{library.text()}\n\n\n{used}\n')
    assert "torch_ort_ckpt" not in path.read_text()
    assert_clean(path)


def renamed(folder: Path, target: Path, names: dict[str, str]) -> toc.Artifacts:
    """The artifacts with other names for values, inputs and parameters."""

    def new(name: str) -> str:
        for old, other in names.items():
            if name == old or name.startswith((old + "_grad", old + ".")):
                return other + name[len(old) :]
        return name

    target.mkdir(parents=True)
    for file in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / file)
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
            value.name = new(value.name)
        for node in model.graph.node:
            for values in (node.input, node.output):
                for place, name in enumerate(values):
                    values[place] = new(name)
        onnx.save(model, target / file)
    state = toc.load(folder / "checkpoint", mmap=False)
    state.trainable = {new(name): value for name, value in state.trainable.items()}
    state.frozen = {new(name): value for name, value in state.frozen.items()}
    state.optimizer = {}
    return toc.Artifacts.load(target, checkpoint=state)


VALUE_NAMES = [
    "device",
    "torch",
    "nn",
    "Tensor",
    "gemm",
    "self",
    "l",
    "lambda",
    "input",
    "inf",
    "None",
    "operator",
    "F",
    "Model",
    "add",
    "x²",
    "重",
    "1",
    "a'\"\\",
]


def test_inputs_and_values_may_have_any_name(tmp_path: Path) -> None:
    width = toc.Artifacts.load(ADAMW).inputs[0].shape[1]
    batch = torch.randn(4, width), torch.zeros(4, dtype=torch.int64)
    (tmp_path / "sources").mkdir()
    for number, name in enumerate(VALUE_NAMES):  # of an input, and of a value inside
        artifacts = renamed(ADAMW, tmp_path / str(number), {"x": name, "h1": VALUE_NAMES[number - 1]})
        assert_same(artifacts, batch, tmp_path / "sources" / f"model{number}.py")
    assert_clean(tmp_path / "sources")


PARAMETER_NAMES = ["half", "training", "forward", "training_graph", "class", "0", "a b", "T_destination", "l", "weights²", "fc1.weight"]


def test_parameters_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    for number, name in enumerate(PARAMETER_NAMES):
        artifacts = renamed(ADAMW, tmp_path / str(number), {"fc2": name})
        batch = torch.randn(4, artifacts.inputs[0].shape[1]), torch.zeros(4, dtype=torch.int64)
        assert_same(artifacts, batch, tmp_path / "sources" / f"model{number}.py")
    assert_clean(tmp_path / "sources")


def test_the_folder_s_name_is_no_code(tmp_path: Path) -> None:
    folder = tmp_path / 'x"""\nraise SystemExit(1)\n"""\\'
    artifacts = renamed(ADAMW, folder, {})
    batch = torch.randn(4, artifacts.inputs[0].shape[1]), torch.zeros(4, dtype=torch.int64)
    assert_same(artifacts, batch, tmp_path / "model.py")
    assert_clean(tmp_path / "model.py")


def eval_only(folder: Path, text: str, parameters: dict[str, Tensor]) -> toc.Artifacts:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "acme" : 1]> {text}')
    onnx.save(model, folder / "eval_model.onnx")
    return toc.Artifacts.load(folder, checkpoint=toc.CheckpointState(parameters))


def test_branches_and_loops_become_methods(tmp_path: Path) -> None:
    text = """agraph (float[n, 3] x, float[3] w) => (float[n, 3] y, float[3] s)
    <int64 zero = {0}, int64 three = {3}, float[3] more = {1.0, 2.0, 0.1}>
    {
        shape = Shape(x)  n = Gather(shape, zero)  large = Greater(n, three)
        y = If (large) <
            then_branch = g1 () => (float[n, 3] a) { doubled = Mul(x, w)  a = Add(doubled, more) },
            else_branch = g2 () => (float[n, 3] b) { b = Sub(x, w) }
        >
        first = Gather(x, zero)
        s = Loop (n, , first) <body = g3 (int64 i, bool go, float[3] v) => (bool go_on, float[3] v_out)
            { v_out = Add(v, w)  go_on = Identity(go) }>
    }"""
    artifacts = eval_only(tmp_path, text, {"w": torch.tensor([1.0, -2.0, 0.5])})
    plain = toc.to_torch_module(artifacts, source=tmp_path / "model.py").eval()
    w = plain.w.detach()
    for rows in (2, 5):
        x = torch.randn(rows, 3)
        y, s = plain(x)
        torch.testing.assert_close(y, x * w + torch.tensor([1.0, 2.0, 0.1]) if rows > 3 else x - w)
        torch.testing.assert_close(s, x[0] + rows * w)
    assert_clean(tmp_path / "model.py")


def test_two_constants_may_be_one_tensor(tmp_path: Path) -> None:
    """A Cast that changes nothing, computed at translation: its result is its input. Large ones are buffers of a state dict."""
    text = """agraph (float[100] x, float[100] w) => (float[100] y)
    <int64 zero = {0}, int64 hundred = {100}, int64 one = {1}>
    {
        numbers = Range(zero, hundred, one)  table = Cast<to = 1>(numbers)  again = Cast<to = 1>(table)
        a = Mul(x, table)  b = Mul(w, again)  y = Add(a, b)
    }"""
    artifacts = eval_only(tmp_path, text, {"w": torch.full((100,), 2.0)})
    plain = toc.to_torch_module(artifacts, source=tmp_path / "model.py").eval()
    x = torch.randn(100)
    torch.testing.assert_close(plain(x), (x + 2) * torch.arange(100))
    assert_clean(tmp_path / "model.py")


FACTORS = (2.0, 3.0)
TABLE = {"up": torch.ceil, "twice": lambda x: x}


def shift(x: Tensor, by: int) -> Tensor:
    return x.roll(by)


def twist(x: Tensor, *, amount: float = FACTORS[0]) -> Tensor:
    device = x.device
    return shift(TABLE["up"](x), 1).to(device=device) * amount * math.sqrt(FACTORS[1])


@pytest.mark.usefixtures("_restored_registry")
def test_an_operator_of_the_user_s_is_copied_with_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "twice", torch.abs)
    toc.register_op("Twist", domain="acme")(twist)
    artifacts = eval_only(
        tmp_path, "agraph (float[n] x, float[n] w) => (float[n] y) { a = acme.Twist(x)  y = Mul(a, w) }", {"w": torch.ones(3)}
    )
    plain = toc.to_torch_module(artifacts, source=tmp_path / "model.py").eval()
    x = torch.tensor([0.5, 1.5, 2.0])
    torch.testing.assert_close(plain(x), twist(x))
    text = (tmp_path / "model.py").read_text()
    assert "def shift(" in text
    assert "FACTORS = (2.0, 3.0)" in text
    assert_clean(tmp_path / "model.py")


@pytest.mark.usefixtures("_restored_registry")
def test_an_operator_that_can_t_be_copied_is_named(tmp_path: Path) -> None:
    amount = torch.tensor(2.0)

    @toc.register_op("Twist", domain="acme")
    def twisted(x: Tensor) -> Tensor:
        return x * amount

    artifacts = eval_only(
        tmp_path, "agraph (float[n] x, float[n] w) => (float[n] y) { a = acme.Twist(x)  y = Mul(a, w) }", {"w": torch.ones(3)}
    )
    with pytest.raises(toc.CheckpointError, match=r"twisted.*can't be copied.*'amount' of the function around it"):
        toc.to_torch_module(artifacts)


@pytest.mark.ort
@pytest.mark.parametrize("suffix", ["_fp16", "_bf16"])
def test_half_precision_aliases_are_made_from_their_masters(suffix: str, tmp_path: Path) -> None:
    from tests.models import batch
    from tests.runtime.test_mixed_precision import mixed

    (tmp_path / "artifacts").mkdir()
    artifacts = mixed(tmp_path / "artifacts", suffix)
    plain = assert_same(artifacts, batch("mlp"), tmp_path / "model.py")
    assert all(parameter.dtype is torch.float32 for parameter in plain.parameters())

"""PyTorch's private names: all of them in one module, and training gives the same numbers without any of them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.truth import DATA
from torch_ort_ckpt import pytorch_private

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_ort_ckpt"
GRADIENTS = ("graphs/gradients/private_export.py", "graphs/gradients/decompositions/private.py")
"""What traces and rewrites graphs: `tests/graphs/test_joint_graph.py` removes the private way of making the joint graph."""

TRAIN = '''
import contextlib, importlib, importlib.util, json, sys
import torch

folder = sys.argv[1]
engines = ["torch", *(["ort"] if importlib.util.find_spec("onnxruntime") else [])]


def owner_of(path):
    *parts, last = path.split(".")
    place = torch
    for number, part in enumerate(parts):
        place = getattr(place, part, None) or sys.modules[".".join(["torch", *parts[: number + 1]])]
    return place, last


@contextlib.contextmanager
def without(paths):
    """The names are missing while the package is imported: PyTorch itself may need them when it runs."""
    gone = []
    for path in paths:
        place, name = owner_of(path)
        if (module := sys.modules.pop(f"torch.{path}", None)) is not None:
            gone.append((sys.modules.__setitem__, f"torch.{path}", module))
        if name in vars(place):
            gone.append((setattr, place, name, vars(place)[name]))
            delattr(place, name)
        else:  # of a base class in C++, which can't be changed
            gone.append((delattr, place, name))
            setattr(place, name, None)
    try:
        yield
    finally:
        for undo, *arguments in gone:
            undo(*arguments)


def numbers():
    """Losses, gradients and weights of a few steps in every manner."""
    toc = importlib.import_module("torch_ort_ckpt")
    found = {}
    for engine in engines:
        torch.manual_seed(0)
        model = toc.OrtModule(folder, engine=engine)
        optimizer = toc.OrtOptimizer(model, lr=0.01, fused=engine == "torch")
        batch = torch.randn(4, model.artifacts.inputs[0].shape[1]), torch.tensor([0, 1, 1, 0])
        values = []
        for step in range(2):
            loss = model(*batch)
            loss.backward(retain_graph=True)
            (loss * 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        for step in range(2):
            model.lazy_reset_grad()
            values.append(model.train_step(*batch).item())
            model.train_step(*batch)
            optimizer.step()
        hooked = []
        optimizer.register_step_post_hook(lambda *_: hooked.append(1))
        optimizer.step()
        assert hooked == [1]
        values.append(model.eval()(*batch).item())
        values += [value.double().sum().item() for value in model.state_dict().values()]
        found[engine] = values
    return found


def fresh():
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_ort_ckpt"]:
        del sys.modules[name]


expected = numbers()
names = list(sys.modules["torch_ort_ckpt.pytorch_private"].NAMES)
assert not sys.modules["torch_ort_ckpt.pytorch_private"].MISSING
results = {"": expected}
for missing in [[name] for name in names] + [names]:
    fresh()
    with without(missing):
        importlib.import_module("torch_ort_ckpt.pytorch_private")
        importlib.import_module("torch_ort_ckpt.engines.ort.gradients")
        importlib.import_module("torch_ort_ckpt.runtime.optimizer")
    left = sys.modules["torch_ort_ckpt.pytorch_private"].MISSING
    assert left == missing, left
    results[" ".join(missing)] = numbers()
print(json.dumps(results))
'''


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[float]]]:
    """By what is missing ("" for nothing): the numbers of every engine."""
    arguments = [sys.executable, "-c", TRAIN, str(DATA / "fbv2_ort1_19_2_adamw_full")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("missing", [*pytorch_private.NAMES, " ".join(pytorch_private.NAMES)], ids=lambda text: text[:40])
def test_training_does_without(missing: str, results: dict[str, dict[str, list[float]]]) -> None:
    for engine, values in results[""].items():
        assert results[missing][engine] == pytest.approx(values, rel=1e-5, abs=1e-6), engine


def test_no_other_module_uses_a_private_name_of_pytorch() -> None:
    """`torch._x`, `torch.a._b` and `from torch.a import _b`; attributes of objects that we subclass (`module._parameters`) aside."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() in ("pytorch_private.py", *GRADIENTS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "torch":
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                parts = [part for alias in node.names if alias.name.partition(".")[0] == "torch" for part in alias.name.split(".")]
            elif isinstance(node, ast.Attribute):
                parts = [] if (text := ast.unparse(node)).partition(".")[0] not in ("torch", "dist", "nn", "F") else text.split(".")
            else:
                continue
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.append(f"{path.relative_to(ROOT)}: {'.'.join(parts)}")
    assert not found


@pytest.mark.parametrize("module", ["torch.distributed.tensor", "torch.distributed._tensor"])
def test_a_distributed_tensor_is_told_wherever_its_class_lives(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has moved the class; and a build without it has no such tensors."""
    import types

    import torch

    class DTensor(torch.Tensor):
        pass

    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    value = torch.zeros(2).as_subclass(DTensor)
    assert not pytorch_private.is_distributed(value)
    home = types.ModuleType(module)
    home.DTensor = DTensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, home)
    assert pytorch_private.is_distributed(value)
    assert not pytorch_private.is_distributed(torch.zeros(2))

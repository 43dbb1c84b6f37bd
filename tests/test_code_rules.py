"""Rules of the code that neither ruff nor import-linter checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_ort_ckpt"


def nodes(folder: str = "") -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(PACKAGE)), node


def test_no_module_imports_a_private_name_of_another() -> None:
    found = [
        f"{path}: {alias.name}"
        for path, node in nodes()
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not found


@pytest.mark.parametrize("folder", ["runtime", "training", "integrations"])
def test_engines_are_told_by_what_they_can_do_not_by_their_name(folder: str) -> None:
    def by_name(node: ast.Compare) -> bool:
        parts = [node.left, *node.comparators]
        names = [part for part in parts if isinstance(part, ast.Attribute) and part.attr == "name"]
        return bool(names) and any(isinstance(part, ast.Constant) and part.value in ("ort", "torch") for part in parts)

    compared = [(path, node) for path, node in nodes(folder) if isinstance(node, ast.Compare)]
    assert compared
    assert not [f"{path}:{node.lineno}" for path, node in compared if by_name(node)]


@pytest.mark.parametrize("folder", ["runtime", "integrations", "engines", "checkpoint"])
def test_modules_and_optimizers_are_told_by_their_class(folder: str) -> None:
    """`hasattr` would take a user's module for ours. What `training` asks of a user's loader has no class to be told by."""
    calls = [(path, node) for path, node in nodes(folder) if isinstance(node, ast.Call)]
    assert calls
    assert not [f"{path}:{node.lineno}" for path, node in calls if ast.unparse(node.func) == "hasattr"]


PASSES = sorted({path.stem for path in (PACKAGE / "graphs" / "passes").glob("*.py")} - {"__init__"})
TOOLS = ["onnx_ir_models", "padding_amounts", "pipelines", "rewriting"]
"""The order of the passes, and what several of them share."""


@pytest.mark.parametrize("name", [name for name in PASSES if name not in TOOLS])
def test_a_rewrite_has_a_file_a_reason_and_a_test(name: str) -> None:
    folder = PACKAGE / "graphs" / "passes"
    tree = ast.parse((folder / f"{name}.py").read_text())
    public = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    rewrites = [node.name for node in public if ast.unparse(node.returns or ast.Constant(None)) == "int"]
    assert len(rewrites) == 1, rewrites
    assert ast.get_docstring(tree)
    assert f"`{name}`" in (folder / "__init__.py").read_text()
    assert rewrites[0] in (ROOT / "tests" / "graphs" / "passes" / f"test_{name}.py").read_text()


def test_the_tables_of_a_module_are_touched_where_its_parameters_are_placed() -> None:
    """`register_parameter` refuses names that ONNX Runtime allows, so `runtime` uses nn.Module's own dicts. Nothing else has to."""
    names = ("_parameters", "_buffers", "_modules")
    found = {
        path
        for path, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) not in ("self", "state")
    }
    assert found == {"pytorch_private.py", "runtime/parameters.py", "runtime/scopes.py", "runtime/stages.py"}


def test_every_file_that_is_named_exists() -> None:
    """In docstrings, comments and documents: `storage/files.py`, `tests/graphs/gradients/test_joint.py`."""
    known = {path.relative_to(base).as_posix() for base in (ROOT, PACKAGE) for path in base.rglob("*.py")}
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    lost = []
    for path in texts:
        if path.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"`([a-z_]+/[a-z0-9_/]+\.py)`", path.read_text()):
            beside = path.parent / name
            if name not in known and not beside.exists() and not any(other.endswith("/" + name) for other in known):
                lost.append(f"{path.relative_to(ROOT)}: {name}")
    assert not lost

"""Rules of the code that neither ruff nor import-linter checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_ort_ckpt"


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

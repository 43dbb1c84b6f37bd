"""Passes in order, and their common signature."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from torch_ort_ckpt.graphs import passes
from torch_ort_ckpt.graphs.passes.pipelines import AFTER_GRADIENTS, BEFORE_GRADIENTS, EVALUATION, OPTIMIZER, apply

from .small_graphs import kinds, model, node, value

TOOLS = {"pipelines", "rewriting", "declared_shapes", "onnx_ir_models", "padding_amounts"}
MODULES = sorted({module.name for module in pkgutil.iter_modules(passes.__path__)} - TOOLS)


def test_what_was_done_is_told() -> None:
    nodes = [node("Transpose", "x", "a", perm=[0, -1]), node("Dropout", "a", "y")]
    graph = model(nodes, [value("x", [2, 3])], [value("y", None)])
    assert apply(graph, BEFORE_GRADIENTS) == ["count_axes_from_front (1)", "complete_outputs (1)", "remove_identity_transposes (1)"]
    assert kinds(graph) == ["Identity", "Dropout"]


@pytest.mark.parametrize("pipeline", [BEFORE_GRADIENTS, AFTER_GRADIENTS, EVALUATION, OPTIMIZER])
def test_a_graph_that_needs_nothing_stays(pipeline: tuple[passes.pipelines.Pass, ...]) -> None:
    graph = model([node("Relu", "x", "y")], [value("x", [2])], [value("y", [2])])
    before = graph.SerializeToString()
    assert apply(graph, pipeline) == []
    assert graph.SerializeToString() == before


@pytest.mark.parametrize("name", MODULES)
def test_every_pass_has_a_reason_a_test_and_the_signature(name: str) -> None:
    module = importlib.import_module(f"{passes.__name__}.{name}")
    assert f"`{name}`" in (passes.__doc__ or "")
    assert module.__doc__
    assert Path(__file__).with_name(f"test_{name}.py").is_file()
    own = [item for key, item in vars(module).items() if inspect.isfunction(item) and item.__module__ == module.__name__ and key[0] != "_"]
    found = [item for item in own if inspect.signature(item).return_annotation == "int"]
    assert len(found) == 1
    (first, *_) = inspect.signature(found[0]).parameters.values()
    assert (first.name, first.annotation) == ("model", "onnx.ModelProto")

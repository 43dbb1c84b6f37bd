"""Compares a function with itself after decomposition: values and gradients, at the sizes it was traced with and at others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_ort_ckpt.graphs.gradients.decompositions import after_autograd, before_autograd, dropped

Function = Callable[..., Any]
CORE = {op: function for op, function in torch._decomp.core_aten_decompositions().items() if op not in dropped()}


def values_and_gradients(function: Function) -> Function:
    """The function's result and the gradient of a curved sum of it with respect to every floating-point input."""

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        result = function(*leaves)
        loss = (result * result * 0.5 + result).sum()
        wanted = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [result.detach(), *(x * 0 if g is None else g for g, x in zip(gradients, wanted, strict=True))]

    return run


def trace(
    function: Function, inputs: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]] = (), *, optimize: bool = False
) -> torch.fx.GraphModule:
    """The joint graph of the function; `dynamic` lists for each input the axes whose size is a symbol."""
    environment = ShapeEnv(duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=False)
    fakes = []
    for i, x in enumerate(inputs):
        axes = dynamic[i] if i < len(dynamic) else ()
        sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(x.dim())]
        fakes.append(fake_mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes), static_shapes=None))
    table = {**CORE, **after_autograd(optimize=optimize, otherwise=CORE)}
    with fake_mode, enable_python_dispatcher(), before_autograd():
        graph = make_fx(values_and_gradients(function), decomposition_table=table, tracing_mode="real")(*fakes)
    for fake, axes in zip(fakes, dynamic, strict=False):
        for axis in axes:
            size: Any = fake.shape[axis]  # typed as int, but a symbol here
            assert isinstance(size, torch.SymInt), "not a symbol"
            assert size.node.maybe_as_int() is None, f"axis {axis} of {list(fake.shape)} became a constant"
    return graph


def operators(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function"}


def check(
    function: Function,
    *batches: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[int]] = (),
    gone: Sequence[str] = (),
    tolerance: float | None = None,
    optimize: bool = False,
) -> torch.fx.GraphModule:
    """Traces the function with the first batch and compares the graph with eager PyTorch on every batch.

    `gone` names operators that must not be left in the graph.
    """
    graph = trace(function, batches[0], dynamic, optimize=optimize)
    left = {name for name in operators(graph) if any(name == op or name.startswith(op + ".") for op in gone)}
    assert not left, f"still in the graph: {sorted(left)}"
    for batch in batches:
        expected = values_and_gradients(function)(*batch)
        actual = graph(*batch)
        assert len(actual) == len(expected)
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            what = "value" if i == 0 else f"gradient {i - 1}"
            assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)} instead of {list(theirs.shape)}"
            assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype} instead of {theirs.dtype}"
            if not theirs.numel():
                continue
            limit = tolerance or (1e-10 if theirs.dtype == torch.float64 else 2e-5)
            scale = max(float(theirs.abs().max()), 1.0)
            difference = float((ours - theirs).abs().max())
            assert difference <= limit * scale, f"{what} differs by {difference:.2e} of {scale:.2e}"
    return graph

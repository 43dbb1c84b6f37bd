"""The tables: what users add, and what is restored after tracing."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from torch_ort_ckpt import CheckpointError
from torch_ort_ckpt.graphs.gradients import decompositions
from torch_ort_ckpt.graphs.gradients.decompositions import (
    after_autograd,
    before_autograd,
    register_decomposition,
    registry,
    while_exporting,
)
from torch_ort_ckpt.graphs.gradients.decompositions.private import fake_impls

from .agreement import check, operators, trace

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _forget():
    with registry.only_during():
        yield


def test_a_users_decomposition_is_used():
    assert "cosh.default" in operators(trace(torch.cosh, [torch.randn(3)]))

    @register_decomposition(aten.cosh.default)
    def cosh(x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x) + torch.exp(-x)) / 2

    assert after_autograd()[aten.cosh.default] is cosh
    check(torch.cosh, [torch.randn(3)], gone=["cosh"])


def test_a_users_function_before_autograd_is_differentiated():
    @register_decomposition(aten.cosh.default, before_autograd=True)
    def cosh(x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x) + torch.exp(-x)) / 2

    assert aten.cosh.default not in after_autograd()
    check(torch.cosh, [torch.randn(3)], gone=["cosh", "sinh"])


def test_a_users_decomposition_replaces_ours():
    ours = after_autograd()[aten.copy.default]

    @register_decomposition(aten.copy.default)
    def copy(x, src, non_blocking=False):
        return ours(x, src, non_blocking)

    assert after_autograd()[aten.copy.default] is copy


@pytest.mark.parametrize("x", [torch.randn(3), torch.randn(2, 2, dtype=torch.float64)])
def test_not_implemented_leaves_the_operator_as_it_is(x):
    @register_decomposition(aten.cosh.default, before_autograd=True)  # not composed of others by PyTorch
    def cosh(x):
        return NotImplemented

    @register_decomposition(aten.logdet.default, before_autograd=True)  # composed of others
    def logdet(x):
        return NotImplemented

    graph = check(torch.cosh, [x])
    assert {"cosh.default", "sinh.default"} <= operators(graph)
    check(torch.logdet, [torch.eye(3) * 2])


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        (torch.cosh, "torch.ops.aten.cosh.default"),
        ("aten.cosh", "operator that the error message named"),
        (aten.cosh, "torch.ops.aten.cosh.default, torch.ops.aten.cosh.out"),
    ],
)
def test_what_is_not_an_operator_is_refused(operator, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        register_decomposition(operator)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(CheckpointError, match="must be a function, not 3"):
        register_decomposition(aten.cosh.default)(3)


def _kernels() -> list[dict]:
    return [dict(operator.py_kernels) for operator in registry.BEFORE]


def test_everything_is_restored_after_an_error():
    kernels, shapes = _kernels(), dict(fake_impls.op_implementations_dict)
    inside = []

    def fail():
        inside.extend(_kernels())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), before_autograd():
        fail()
    assert inside != kernels
    assert _kernels() == kernels
    assert fake_impls.op_implementations_dict == shapes


def test_nested_uses_share_the_rewrites():
    kernels = _kernels()
    with before_autograd():
        inside = _kernels()
        with before_autograd():
            assert _kernels() == inside
        assert _kernels() == inside
    assert _kernels() == kernels


def test_threads_share_the_rewrites():
    """One leaves while the other is still inside."""
    kernels = _kernels()
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with before_autograd():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    with before_autograd():
        inside = _kernels()
        thread.start()
        entered.wait()
    assert _kernels() == inside
    leave.set()
    thread.join()
    assert _kernels() == kernels


def test_eager_code_does_not_see_the_rewrites():
    called = []

    @register_decomposition(aten.cosh.default, before_autograd=True)
    def cosh(x):
        called.append(x)
        return NotImplemented

    with before_autograd():
        torch.cosh(torch.randn(3, requires_grad=True)).sum().backward()
        assert not called
        with enable_python_dispatcher():
            torch.cosh(torch.randn(3, requires_grad=True)).sum().backward()
    assert called


def test_nothing_is_dropped_that_we_decompose():
    assert not decompositions.dropped() & after_autograd().keys()


def test_a_causal_mask_is_captured_as_it_is():
    layers = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 1)
    target, memory, mask = torch.randn(2, 5, 8), torch.randn(2, 3, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    native = torch.nn.modules.transformer._detect_is_causal_mask
    with while_exporting():
        program = torch.export.export(layers, (target, memory, mask))
    assert torch.nn.modules.transformer._detect_is_causal_mask is native
    torch.testing.assert_close(program.module()(target, memory, mask), layers(target, memory, mask))

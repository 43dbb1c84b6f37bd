"""Gradients of gradients: engine "torch" computes them; everything that can't raises an error instead of returning wrong gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from torch_ort_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.ort  # the artifacts are made by ORT's own tools


def penalized(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum((gradient**2).sum() for gradient in gradients)


@pytest.mark.parametrize("name", ["mlp", "layernorm", "cnn", "transformer", "lstm", "tied"])
def test_engine_torch_computes_a_gradient_penalty_as_pytorch_does(name: str) -> None:
    model, native = toc.OrtModule(exported(name), engine="torch"), module(name)
    x, y = batch(name)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # the only one that PyTorch differentiates twice
        found, expected = penalized(model(x, y), model), penalized(F.cross_entropy(native(x), y), native)
        found.backward()
        expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    ours = dict(model.named_parameters())
    for key, parameter in native.named_parameters():
        scale = float(parameter.grad.abs().max())
        near = 1e-4 * scale + 1e-5  # a bias before a norm has a gradient of zero
        torch.testing.assert_close(ours[key].grad, parameter.grad, rtol=1e-3, atol=near)


def by_grad(model: Any, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def by_backward(model: Any, loss: torch.Tensor) -> None:
    loss.backward(create_graph=True)


def by_scaled_loss(model: Any, loss: torch.Tensor) -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    torch.autograd.grad(loss * scale, [scale, *model.parameters()], create_graph=True)


@pytest.mark.parametrize("ask", [by_grad, by_backward, by_scaled_loss])
def test_engine_ort_refuses_a_graph_over_gradients(ask: Any) -> None:
    model = toc.OrtModule(exported("mlp"), engine="ort", threads=1)
    with pytest.raises(UnsupportedError, match=r'create_graph=True.*engine="torch"'):
        ask(model, model(*batch("mlp")))
    model.zero_grad()
    model(*batch("mlp")).backward()  # first derivatives are there as before
    native = module("mlp")
    x, y = batch("mlp")
    F.cross_entropy(native(x), y).backward()
    torch.testing.assert_close(model.fc1.weight.grad, native.fc1.weight.grad, rtol=1e-5, atol=1e-6)


def test_a_compiled_engine_torch_refuses_them_too() -> None:
    """Compiled, it computes loss and gradients at once."""
    model = toc.OrtModule(exported("mlp"), engine="torch", compile=True)
    with pytest.raises(UnsupportedError, match=r"create_graph=True.*compile=False"):
        by_grad(model, model(*batch("mlp")))

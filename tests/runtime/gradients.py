"""Gradients of the small MLP, for comparison."""

from __future__ import annotations

import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.official import assert_same


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def of_batch(seed: int) -> dict[str, torch.Tensor]:
    """The gradients of one batch alone."""
    model = toc.OrtModule(exported("mlp"), threads=1)
    model(*batch("mlp", seed=seed)).backward()
    return gradients(model)


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value)

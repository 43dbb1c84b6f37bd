"""Artifacts against the module they were made from: loss, gradients and buffers of one training step, on everything that runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.official import Official

LossOf = Callable[..., torch.Tensor]
"""The loss of a module and a batch, in PyTorch."""

RUNNERS = ("official", "ort", "torch", "module")


def assert_trains_like(
    artifacts: toc.Artifacts, native: nn.Module, batches: Sequence[Sequence[torch.Tensor]], loss_of: LossOf, folder: Path
) -> None:
    """Every batch, at its own size: loss within 1e-5, gradients within 1e-4 of the tensor's largest (besides what float64 shows to be
    rounding), buffers as PyTorch keeps them."""
    for runner in RUNNERS:
        reference, exact = copy.deepcopy(native), copy.deepcopy(native).double()
        run = _runner(runner, artifacts, folder)
        for batch in batches:
            reference.zero_grad()
            expected = loss_of(reference, *batch)
            expected.backward()
            rounding = _rounding(reference, exact, loss_of, batch)
            loss, gradients, states = run(batch)
            assert abs(loss - expected.item()) <= 1e-5 * max(1.0, abs(expected.item())), (runner, loss, expected.item())
            scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
            for name, parameter in reference.named_parameters():
                if name in artifacts.trainable:
                    assert parameter.grad is not None, name
                    largest = max(float(parameter.grad.abs().max()), 1e-4 * scale)
                    difference = float(np.abs(gradients[name] - parameter.grad.numpy()).max())
                    assert difference <= 1e-4 * largest + 10 * rounding[name], (runner, name, difference, largest)
            for name, buffer in reference.named_buffers():
                counts = runner in ("official", "module") and name in artifacts.counters
                if name in states and not counts:  # these two do not count batches
                    np.testing.assert_allclose(states[name], buffer.numpy(), rtol=1e-4, atol=1e-5, err_msg=f"{runner} {name}")


def _rounding(reference: nn.Module, exact: nn.Module, loss_of: LossOf, batch: Sequence[torch.Tensor]) -> dict[str, float]:
    """How far the gradients in float32 are from those in float64; nothing is allowed for a module that can't compute in float64."""
    exact.zero_grad()
    try:
        loss_of(exact, *(value.double() if value.is_floating_point() else value for value in batch)).backward()
    except RuntimeError:  # it has tensors of float32 in its code
        return dict.fromkeys(dict(reference.named_parameters()), 0.0)
    pairs = {name: (value.grad, exact.get_parameter(name).grad) for name, value in reference.named_parameters()}
    return {name: 0.0 if a is None or b is None else float((a.double() - b).abs().max()) for name, (a, b) in pairs.items()}


Step = Callable[[Sequence[torch.Tensor]], tuple[float, dict[str, Any], dict[str, Any]]]


def _runner(name: str, artifacts: toc.Artifacts, folder: Path) -> Step:
    """A function of a batch that returns loss, gradients and buffers."""
    if name == "official":
        official = Official(artifacts, folder, optimizer=False)

        def run(batch: Sequence[torch.Tensor]) -> Any:
            official.module.lazy_reset_grad()
            loss = official.loss(*batch)
            first = loss[0] if isinstance(loss, (list, tuple)) else loss
            return float(first), dict(official.gradients()), dict(official.parameters())

        return run
    model = toc.to_torch_module(artifacts) if name == "module" else toc.OrtModule(artifacts, engine=name, threads=1)
    model.train()

    def step(batch: Sequence[torch.Tensor]) -> Any:
        model.zero_grad()
        loss = model(*batch)
        first = loss[0] if isinstance(loss, tuple) else loss
        first.backward()
        gradients = {key: value.grad.numpy() for key, value in model.named_parameters() if value.grad is not None}
        return first.item(), gradients, {key: value.detach().numpy() for key, value in model.state_dict().items()}

    return step

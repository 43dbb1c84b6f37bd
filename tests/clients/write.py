"""Artifacts for a client, with the batches to train on and the losses that PyTorch finds on them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import CLASSES, CNN, MLP, Transformer

SIZES = (4, 4, 7, 4, 6, 4)
"""A batch of each of these sizes is one step."""
ACCUMULATED = 3
"""The step whose batch is seen twice."""
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def focal_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that ORT's own builder has no block for."""
    entropy = F.cross_entropy(outputs, labels, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


class UnbiasedCNN(CNN):
    """The bias of a convolution before a BatchNorm has no gradient but rounding, which AdamW enlarges: it differs between any two
    implementations, and so do the running means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1.register_parameter("bias", None)
        self.conv2.register_parameter("bias", None)


MODULES: dict[str, tuple[type[nn.Module], tuple[int, ...], Any]] = {
    "mlp": (MLP, (12,), "cross_entropy"),
    "cnn": (UnbiasedCNN, (3, 8, 8), "cross_entropy"),
    "transformer": (Transformer, (5,), focal_loss),
}
CASES = [*((name, "adamw") for name in MODULES), ("mlp", "sgd")]


def write(folder: Path, name: str, optimizer: str, for_ort: str | None) -> None:
    """Artifacts and `expected.npz`."""
    kind, shape, loss = MODULES[name]
    torch.manual_seed(0)
    module = kind().train()
    batches = [(_values(name, size, shape), torch.randint(0, CLASSES, (size,))) for size in SIZES]
    toc.export_artifacts(module, batches[0], folder, loss=loss, optimizer=optimizer, for_ort=for_ort, extra_outputs=["output"])
    function = F.cross_entropy if isinstance(loss, str) else loss
    twin = copy.deepcopy(module)
    step = OPTIMIZERS[optimizer](twin.parameters(), lr=1e-3)
    losses = []
    for place, (inputs, labels) in enumerate(batches):
        if place == ACCUMULATED:
            function(twin(inputs), labels).backward()
        found = function(twin(inputs), labels)
        found.backward()
        step.step()
        step.zero_grad()
        losses.append(found.item())
    twin.eval()
    output = twin(batches[0][0]).detach()
    floats = [*module.parameters(), *(value for value in module.buffers() if value.is_floating_point())]
    counters = [value for value in module.buffers() if not value.is_floating_point()] if for_ort not in ("1.16", "1.17") else []
    values: dict[str, Any] = {
        f"{key}{place}": value.numpy() for place, batch in enumerate(batches) for key, value in zip(("x", "labels"), batch, strict=True)
    }
    np.savez(
        folder / "expected.npz",
        names=json.dumps(["x", "labels"]),
        losses=np.array(losses),
        accumulated=np.array([ACCUMULATED]),
        eval=function(output, batches[0][1]).item(),
        output=output.numpy(),
        trainable=sum(value.numel() for value in module.parameters()),
        floats=sum(value.numel() for value in [*floats, *counters]),
        **values,
    )


def _values(name: str, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 20, (size, *shape)) if name == "transformer" else torch.randn(size, *shape)

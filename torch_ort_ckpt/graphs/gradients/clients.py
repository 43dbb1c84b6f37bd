"""Which release of ONNX Runtime will train: what it reads, and what it can't have.

1.16 and 1.17 read graphs of IR version 9 at most and refuse imported operator sets that they don't know, used or not. They count
BatchNorm's `num_batches_tracked` in the contiguous buffer of all parameters. Their checkpoints are of version 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
import torch
from torch import nn

from ...checkpoint.state import CheckpointState
from ...dtypes import ALIASABLE
from ...errors import CheckpointError, UnsupportedError
from ..description import all_nodes
from .dynamic_check import BATCH_NORMS

_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Client:
    """A release of ONNX Runtime: the newest IR version and operator set that it reads, and its checkpoints' version."""

    release: str
    ir_version: int
    opset: int
    checkpoint_version: int
    counters: bool
    """Whether the checkpoint may hold integer counters."""

    def refuse_module(self, module: nn.Module) -> None:
        """Raise for what this release can't train rightly."""
        if self.counters:
            return
        for name, part in module.named_modules():
            if isinstance(part, BATCH_NORMS) and part.track_running_stats and part.momentum is None:
                raise UnsupportedError(
                    f"a BatchNorm with momentum=None needs a counter, which ONNX Runtime {self.release} can't keep",
                    field=name,
                    remedy='Give it a momentum, 0.1 for example, or use for_ort="1.18".',
                )

    def adapt(self, model: onnx.ModelProto) -> None:
        """Lower what can be lowered (in place), and refuse what this release can't read."""
        used = {node.domain for node in all_nodes(model.graph)} | {""}
        for place in reversed(range(len(model.opset_import))):
            item = model.opset_import[place]
            if item.domain not in used and item.domain != "ai.onnx":
                del model.opset_import[place]
            elif item.domain in ("", "ai.onnx") and item.version > self.opset:
                raise UnsupportedError(
                    f"ONNX Runtime {self.release} reads operator sets up to {self.opset}, not {item.version}",
                    field="opset",
                    remedy="Leave opset out, or choose a lower one.",
                )
        model.ir_version = min(model.ir_version, self.ir_version)

    def state(self, trainable: Iterable[str], states: Mapping[str, torch.Tensor]) -> CheckpointState:
        """The checkpoint of these tensors."""
        chosen = set(trainable)
        frozen = {name: value for name, value in states.items() if name not in chosen and self._holds(name, value)}
        return CheckpointState(
            trainable={name: value for name, value in states.items() if name in chosen},
            frozen=frozen,
            format_version=self.checkpoint_version,
        )

    def continued(self, state: CheckpointState, trainable: Iterable[str], values: Mapping[str, torch.Tensor]) -> CheckpointState:
        """The checkpoint of a run that goes on: its moments and properties stay. These parameters are trained; `values` replace others."""
        chosen = set(trainable)
        tensors = {**state.parameters, **values}
        groups = {
            name: dataclasses.replace(group, states={key: moments for key, moments in group.states.items() if key in chosen})
            for name, group in state.optimizer.items()
        }
        return CheckpointState(
            trainable={name: value for name, value in tensors.items() if name in chosen},
            frozen={name: value for name, value in tensors.items() if name not in chosen and not self._is_unwanted_counter(name)},
            optimizer=groups,
            properties=dict(state.properties),
            format_version=self.checkpoint_version,
        )

    def _is_unwanted_counter(self, name: str) -> bool:
        return not self.counters and name.endswith(_COUNTER)

    def _holds(self, name: str, value: torch.Tensor) -> bool:
        if not self.counters and name.endswith(_COUNTER) and not value.is_floating_point():
            return False
        return value.dtype in ALIASABLE


_CLIENTS = {
    "1.16": Client("1.16", 9, 19, 1, counters=False),
    "1.17": Client("1.17", 9, 20, 1, counters=False),
    "1.18": Client("1.18", 10, 21, 2, counters=True),
    "1.19": Client("1.19", 10, 21, 2, counters=True),
}


def client_of(release: str | None) -> Client:
    """The client of a release such as "1.17" or "1.17.3"; None is 1.18 and later."""
    if release is None:
        return _CLIENTS["1.18"]
    key = ".".join(str(release).split(".")[:2])
    if key not in _CLIENTS:
        raise CheckpointError(f"for_ort={release!r} is no release that trains", field="for_ort", remedy=f"Use {', '.join(_CLIENTS)}.")
    return _CLIENTS[key]

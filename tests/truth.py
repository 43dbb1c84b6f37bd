"""Ground truth beside the real checkpoints in `tests/data`: each folder has a `truth.json` and a `truth.npz`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_ort_ckpt import CheckpointState
from torch_ort_ckpt.storage.tensors import byte_view

DATA = Path(__file__).parent / "data"


def fixtures(prefix: str) -> list[str]:
    """Names of the fixtures whose name starts so, for parametrising."""
    return sorted(place.name for place in DATA.iterdir() if place.is_dir() and place.name.startswith(prefix))


@dataclass
class Truth:
    """One fixture: where it is and what it holds."""

    name: str

    @property
    def folder(self) -> Path:
        return DATA / self.name

    @cached_property
    def json(self) -> dict[str, Any]:
        return json.loads((self.folder / "truth.json").read_text())

    @cached_property
    def arrays(self) -> Any:
        return np.load(self.folder / "truth.npz")

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.json["checkpoint"]

    def assert_equal(self, state: CheckpointState) -> None:
        """Every parameter, moment and property of `state`, bit for bit, and nothing more."""
        assert state.parameters.keys() == self.json["parameters"].keys()
        for name, entry in self.json["parameters"].items():
            home = state.trainable if entry["requires_grad"] else state.frozen
            assert_tensor(home[name], entry, self.arrays)
        groups = self.json["optimizer_groups"]
        assert state.optimizer.keys() == groups.keys()
        for group_name, entry in groups.items():
            group = state.optimizer[group_name]
            assert group.step == entry["step"]
            assert group.initial_lr == entry["initial_learning_rate"]
            assert group.states.keys() == entry["states"].keys()
            for param, moments in entry["states"].items():
                assert group.states[param].keys() == moments.keys()
                for moment, key in moments.items():
                    assert raw(group.states[param][moment]) == self.arrays[key].tobytes()
        assert state.properties == {name: entry["value"] for name, entry in self.json["properties"].items()}
        kinds = {"int": int, "float": float, "string": str}
        assert all(type(state.properties[name]) is kinds[entry["type"]] for name, entry in self.json["properties"].items())


def assert_tensor(value: Any, entry: dict[str, Any], arrays: Any) -> None:
    assert list(value.shape) == entry["shape"]
    if entry["dtype"] == "string":
        assert value.reshape(-1).tolist() == entry["strings"]
        return
    assert str(value.dtype).removeprefix("torch.") == entry["dtype"].replace("float8e", "float8_e")
    if entry["array"] is None:
        assert value.is_meta
    else:
        assert raw(value) == arrays[entry["array"]].tobytes()


def raw(tensor: torch.Tensor) -> bytes:
    return byte_view(tensor).numpy().tobytes() if tensor.numel() else b""

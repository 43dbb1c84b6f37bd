"""Odd training states: unlikely in a real run, but possible to save. State number N of a seed is always the same.

Most parts of a state are plain; a few are odd, so that formats refuse some states for one reason each and keep the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_ort_ckpt import CheckpointState, OptimizerGroup, PartitionInfo
from torch_ort_ckpt.dtypes import TORCH_FROM_ONNX

DTYPES = [*TORCH_FROM_ONNX.values()]
NAMES = (
    *("", ".", "..", "/", "//", "a/", "/a", "a/b", "a/b/c", "a//b", "./a", "../a", "a\\b", "A", "a", "ß", "SS", "ss", "İ", "é", "e\u0301"),
    *(
        "имя",
        "重み",
        "💾",
        "\u202e",
        "\ufeff",
        "\x00",
        "a\x00b",
        "\n",
        "\x1b[2J",
        "\ud800",
        "a b",
        " ",
        "con",
        "nul.txt",
        "a" * 300,
        "ж" * 3000,
    ),
    *("__metadata__", "torch_ort_ckpt", "torch_ort_ckpt.x", "torch_ort_ckpt.set", "format", "names", "properties", "model", "model.w"),
    *(
        "optimizer.group0.w.momentum0",
        "optim.state.w.exp_avg",
        "state_dict",
        "total_size",
        "Step",
        "Moment_1",
        "Moment_1_w0",
        "Update_Count_w0",
    ),
    *("shared_optimizer_state", "full_precision", "w0_fp16", "w0_bf16", "w1_fp16", "_fp16", "_bf16", "_fp16_fp16", "w0_view_1", "step"),
    *("momentum0", "module.w0", "_orig_mod.w0", "w0.weight", "group0", "group0_momentum0", "builtin.step", "w0#1", "group0/w0/momentum0"),
)
MOMENTS = (
    "",
    "step",
    "momentum2",
    "Moment_1",
    "Moment_2",
    "Update_Count",
    "exp_avg",
    "a/b",
    "a_b",
    "..",
    "x\x00",
    "\ud800",
    "momentum0_fp16",
    "é",
)
KNOWN_PROPERTIES = (
    "step", "weight_update_step", "round", "training_data_set_index", "loss_scaler_state", "optimizer_name", "mixed_precision", "user_dict",
    "world_rank", "world_size", "data_parallel_size", "horizontal_parallel_size", "zero_stage", "zero_optimization_stage",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 53, (1 << 53) + 1, 1 << 200),
    *(0.0, -0.0, 0.1, 1e300, -1e300, 5e-324, 1e-45, math.pi, math.nan, math.inf, -math.inf),
    *(
        "",
        "0",
        "-0",
        "007",
        "1.5",
        "nan",
        "a",
        "é",
        "\x00",
        "\ud800",
        "{}",
        "null",
        "AdamOptimizer",
        "LambOptimizer",
        "SGDOptimizer",
        "x" * 5000,
    ),
)
STEPS = (0, 0, 1, 7, (1 << 53) + 1, (1 << 63) - 2, (1 << 63) - 1, 1 << 63, 1 << 70, -1)
RATES = (0.001, 0.1, 0.0, -0.0, 1e-45, 1e300, math.inf, math.nan)
HYPERPARAMETERS: tuple[Any, ...] = (
    *({"betas": (0.9, 0.999)}, {"betas": [0.9, 0.999]}, {"eps": 1e-8, "weight_decay": 0}, {"a": ((1, 2), [3, (4,)])}, {"n": None}),
    *({"b": True}, {"one": 1, "two": 1.0}, {"big": 1 << 80}, {"nan": math.nan, "zero": -0.0}, {"": ""}, {"nested": {"a": {"b": (1,)}}}),
    *(
        {1: 2},
        {"d": {1: 2}},
        {"tensor": torch.ones(1)},
        {"text": "\ud800"},
        {"__tuple__": [1]},
        {"t": {"__tuple__": [1]}},
        {"__dict__": {}},
    ),
    *({"builtin.step": 3}, {"empty": ()}, {"lr": 3.0}, {"params": [1, 2]}, {"set": {1}}, {"complex": 1j}, {"bytes": b"x"}),
    *({"np": np.float64(0.5)}, {"np": np.int64(3)}),
)
SHAPES = ((), (1,), (3,), (2, 3), (0,), (0, 3), (2, 0, 5), (1, 1, 1), (1,) * 9)


def odd_state(seed: int, number: int) -> CheckpointState:
    return _Maker(random.Random(f"{seed}/{number}")).state()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.oddness = rng.choice((0.0, 0.03, 0.1, 0.3))

    def odd(self, factor: float = 1.0) -> bool:
        return self.rng.random() < self.oddness * factor

    def state(self) -> CheckpointState:
        rng, state = self.rng, CheckpointState()
        for number in range(rng.choice((0, 1, 2, 3, 3, 5))):
            name = rng.choice(NAMES) if self.odd(2) else f"w{number}"
            home = state.frozen if rng.random() < 0.3 else state.trainable
            if name not in state.parameters or self.odd():
                home[name] = self.value()
        if state.parameters and self.odd():
            self.twin(state)
        for name, value in list(state.parameters.items()):
            if rng.random() < 0.2 and isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided:
                self.alias(state, name, value)
        if rng.random() < 0.7:
            self.groups(state)
        for number in range(rng.choice((0, 0, 1, 2, 4))):
            self.property(state, number)
        for name in [*state.parameters, "elsewhere"]:
            if self.odd(0.7):
                dims = rng.choice(((2, 3), (), (0,), (5,), (1 << 40, 2), (1 << 70,), (-1,)))
                state.partitions[name] = PartitionInfo(dims, rng.choice((-1, 0, 1, 1, 7, 1 << 70)))
        if self.odd(0.3):
            self.make_nominal(state)
        return state

    def twin(self, state: CheckpointState) -> None:
        """Two names for one tensor, or for two views of one memory."""
        name, value = self.rng.choice(list(state.parameters.items()))
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            state.trainable[f"twin of {name[:20]}"] = self.rng.choice((value, value.detach(), value.reshape(-1)[:1], value[..., None]))

    def alias(self, state: CheckpointState, name: str, value: torch.Tensor) -> None:
        dtype = self.rng.choice((torch.float16, torch.bfloat16))
        state.mixed_precision[name] = value.detach().to(dtype)
        if self.odd(0.3):
            state.mixed_precision[name] = torch.ones(self.rng.choice(SHAPES)).to(dtype)
        if self.odd(0.3):
            state.mixed_precision[f"{name}x"] = torch.ones(2).to(dtype)

    def groups(self, state: CheckpointState) -> None:
        rng = self.rng
        count = rng.choice((2, 3, 10)) if self.odd(2) else 1
        for number in range(count):
            name = rng.choice(NAMES) if self.odd(2) else f"group{number}"
            state.optimizer[name] = group = OptimizerGroup(rng.choice(STEPS) if self.odd(2) else rng.randrange(100))
            group.initial_lr = rng.choice(RATES) if self.odd() else 0.001
            group.lr = rng.choice(RATES) if rng.random() < 0.3 else None
            if rng.random() < 0.3:
                group.hyperparameters = rng.choice(HYPERPARAMETERS) if self.odd(3) else {"betas": (0.9, 0.95), "eps": 1e-8}
            kept = rng.choice((("momentum0", "momentum1"), ("momentum0", "momentum1"), ("momentum0",), ()))
            for param in [*list(state.trainable)[number::count], *(["elsewhere"] if self.odd(0.5) else [])]:
                group.states[param] = self.moments(state.trainable.get(param), kept, group.step)

    def moments(self, value: Any, kept: tuple[str, ...], step: int) -> dict[str, Any]:
        rng = self.rng
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else (2,)
        states: dict[str, Any] = {moment: self.tensor(torch.float32, shape) for moment in kept if not self.odd(0.5)}
        if self.odd():
            states[rng.choice(MOMENTS)] = self.value()
        if self.odd(1.5):
            steps = (torch.tensor(3), torch.tensor(3.0), torch.tensor([3]), torch.tensor((1 << 53) + 1), torch.tensor(3, dtype=torch.int32))
            odd = (torch.tensor(-1), torch.tensor(2.5), torch.tensor(math.nan), torch.tensor((1 << 63) - 1), torch.zeros(2))
            same = torch.tensor(step if -(1 << 63) <= step < 1 << 63 else 0)
            states["step"] = rng.choice((*steps, *steps, same, rng.choice(odd)))
        return states

    def property(self, state: CheckpointState, number: int) -> None:
        rng = self.rng
        name = rng.choice((*NAMES, *KNOWN_PROPERTIES)) if self.odd(2) else f"p{number}"
        if self.odd(2):
            state.properties[name] = rng.choice(NUMBERS)
        else:
            state.properties[name] = rng.choice((rng.randrange(1000), rng.random(), f"text {number}"))

    def make_nominal(self, state: CheckpointState) -> None:
        state.nominal = True
        if self.rng.random() < 0.7:
            for home in (state.trainable, state.frozen, state.mixed_precision):
                for name, value in home.items():
                    if isinstance(value, torch.Tensor):
                        home[name] = torch.empty((), dtype=value.dtype, device="meta")

    def value(self) -> Any:
        if self.odd(0.7):
            return self.strings()
        if self.odd(1.5):
            return self.rng.choice(_LAYOUTS)(self)
        return self.tensor(self.rng.choice(DTYPES) if self.rng.random() < 0.3 else torch.float32, None)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> torch.Tensor:
        """Any bits: NaN of all kinds, infinities, denormals."""
        shape = self.rng.choice(SHAPES) if shape is None else shape
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        raw = self.rng.randbytes(count * dtype.itemsize)
        if dtype == torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)

    def strings(self) -> Any:
        shape = self.rng.choice(SHAPES)
        texts: list[Any] = [self.rng.choice(("", "a", "é", "💾", "\x00", "a\x00b", "\udc80", "x" * 300)) for _ in range(math.prod(shape))]
        if texts and self.odd(0.5):
            texts[0] = self.rng.choice((1, None, b"bytes", 1.5, "\ud800", np.str_("np")))
        array = np.empty(len(texts), dtype=object)
        array[:] = texts
        return array.reshape(shape)


_LAYOUTS: tuple[Callable[[_Maker], torch.Tensor], ...] = (
    lambda make: make.tensor(torch.float32, (3, 2)).t(),
    lambda make: make.tensor(torch.float32, (6,))[::2],
    lambda make: make.tensor(torch.float32, (1,)).expand(4),
    lambda make: make.tensor(torch.float32, (1, 3)).expand(2, 3),
    lambda make: make.tensor(torch.complex64, (3,)).conj(),
    lambda make: make.tensor(torch.complex64, (3,)).conj().imag,
    lambda make: torch.nn.Parameter(make.tensor(torch.float32, (2, 2))),
    lambda make: make.tensor(torch.float32, (1000,))[500:503],
    lambda make: make.tensor(torch.int64, (2, 3, 4)).permute(2, 0, 1),
    lambda make: torch.ones(3, 3).to_sparse(),
    lambda make: torch.empty(2, 2, device="meta"),
    lambda make: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
)

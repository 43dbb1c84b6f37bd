"""ONNX Runtime's CUDA provider for the model: sessions and bindings with the rules of release 1.19.2, read in its sources.

- A stream handle of 0 counts as "none given": the session makes a stream of its own, which nothing orders with PyTorch's.
- Creating a session, running it and letting it go (freeing its memory) set the current device and never set it back.
- Runs of all threads use one cuDNN handle, that of the thread that made the session: two runs at once are a `Race`.
- Binding an input copies it, on the session's stream, where the device planned for it differs from the tensor's. A copy keeps the value
  of that moment.
- Outputs stay bound: the next run writes over them. An output that is planned elsewhere than it is bound is copied; to plain CPU memory
  that waits for the stream.
- With `disable_synchronize_execution_providers` a run does not wait at its end, and staging buffers in pinned memory are not freed.
- Nodes without a CUDA kernel run on the CPU, behind copies that wait for the stream.

The real CPU session computes the numbers, on the same memory.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.capi import _pybind_state as ort

from torch_ort_ckpt.engines.ort import sequences

from .interface import Cuda
from .machine import Race
from .memory import span

PROVIDER = "CUDAExecutionProvider"
CPU_ONLY = frozenset(
    {"MaxPoolGrad", "AveragePoolGrad", "LSTMTraining", "LSTMGrad", "GRUTraining", "GRUGrad", "BroadcastGradientArgs", "Tan", "ArgMax"}
)
"""Operators without a CUDA kernel in 1.19.2, of those in the tests."""
_CPU_INPUTS = {
    "InPlaceAccumulatorV2": (2,),
    "AdamWOptimizer": (0, 1, 6),
    "SGDOptimizerV2": (0, 3),
    "Reshape": (1,),
    "Dropout": (1, 2),
    "BroadcastGradientArgs": (0, 1),
}
"""Inputs that a CUDA kernel takes from CPU memory."""
_PINNED_OUTPUTS = frozenset({"InPlaceAccumulatorV2", "AdamWOptimizer", "SGDOptimizerV2"})
"""Operators whose first output is a flag in pinned CPU memory."""
_STAGING_BYTES = 256
CPU, PINNED, CUDA = "cpu", "pinned", "cuda"


class Session:
    """InferenceSession and its inner `_sess` in one."""

    def __init__(self, cuda: Cuda, real: Any, model: bytes | str, options: dict[str, str]) -> None:
        self.cuda, self.real, self.options = cuda, real, options
        self.device = int(options["device_id"])
        handle = int(options.get("user_compute_stream", 0))
        machine = cuda.machine
        self.stream = machine.by_handle[handle] if handle else machine.new_stream(self.device, "stream of ONNX Runtime's own")
        machine.set_device(self.device)
        self._arena = np.empty(0)  # an object that the garbage collector does not know: it goes with the session, not before
        weakref.finalize(self._arena, machine.set_device, self.device)
        self._handle = threading.Lock()
        self.during: Callable[[], object] | None = None
        """What a test does while a run is being launched, as another thread could."""
        self.staging = 0
        self.failing = False
        """Whether runs fail, after the first of their work was queued."""
        self.runs = self.synchronised = 0
        self.planned_inputs, self.planned_outputs, self.fallen_back = plan(model, real)

    @property
    def _sess(self) -> Session:
        return self

    def get_inputs(self) -> Any:
        return self.real.get_inputs()

    def get_outputs(self) -> Any:
        return self.real.get_outputs()

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def run_with_iobinding(self, binding: Binding, options: Any = None) -> None:
        if not self._handle.acquire(blocking=False):
            raise Race("two threads use one cuDNN handle at once")
        try:
            if self.during is not None:
                self.during()
            self._run(binding, options)
        finally:
            self._handle.release()

    def _run(self, binding: Binding, options: Any) -> None:
        machine = self.cuda.machine
        machine.set_device(self.device)
        entry = "disable_synchronize_execution_providers"
        apart = options is not None and options.get_run_config_entry(entry) == "1"
        if self.fallen_back:
            machine.wait(self.stream, f"copies around {', '.join(self.fallen_back)}")
        before = {name: _bytes(spans) for name, (_, spans) in binding.inputs.items()}
        try:
            if self.failing:
                raise RuntimeError("out of memory")
            with_values = ort.SessionIOBinding.real(self.real._sess)
            for name, (value, _) in binding.inputs.items():
                with_values.bind_ortvalue_input(name, value)
            for name, slot in binding.outputs.items():
                if slot.value is not None:
                    with_values.bind_ortvalue_output(name, slot.value)
                else:
                    with_values.bind_output(name, ort.OrtDevice(ort.OrtDevice.cpu(), 0, 0))
            self.real._sess.run_with_iobinding(with_values, None)
        finally:
            reads = [piece for _, spans in binding.inputs.values() for piece in spans if self._on_device(piece)]
            changed = [name for name, (_, spans) in binding.inputs.items() if _bytes(spans) != before[name]]
            writes = [piece for name in changed for piece in binding.inputs[name][1] if self._on_device(piece)]
            writes += [
                piece for slot in binding.outputs.values() if slot.value is not None for piece in slot.spans if self._on_device(piece)
            ]
            machine.launch(self.stream, reads, writes, "a run of ONNX Runtime")
        for (name, slot), value in zip(binding.outputs.items(), with_values.get_outputs(), strict=True):
            self._deliver(name, slot, value)
        self.runs += 1
        if apart:
            self.staging += _STAGING_BYTES
        else:
            self.staging, self.synchronised = 0, self.synchronised + 1
            machine.wait(self.stream, "the end of a run")

    def _deliver(self, name: str, slot: Slot, value: Any) -> None:
        planned = self.planned_outputs.get(name, CUDA)
        if slot.device == CPU and planned != CPU:
            self.cuda.machine.wait(self.stream, f"output {name} in plain CPU memory")
        if slot.value is not None:
            return
        if slot.device != CUDA:
            slot.value = value
            return
        result = torch.utils.dlpack.from_dlpack(value.to_dlpack())
        if self.cuda.memory.device_of(result) is None:
            result = self.cuda.memory.like(result, self.stream)
            value = ort.OrtValue.from_dlpack(torch._C._to_dlpack(result), value.data_type() == "tensor(bool)")
        slot.value, slot.spans = value, [span(result)]
        self.cuda.machine.launch(self.stream, [], slot.spans, f"output {name} of ONNX Runtime")

    def _on_device(self, piece: tuple[int, int]) -> bool:
        return self.cuda.memory.device_at(piece[0]) is not None


class Slot:
    """An output of a binding: a value, or the device on which to make one."""

    def __init__(self, value: Any, device: str, spans: list[tuple[int, int]]) -> None:
        self.value, self.device, self.spans = value, device, spans


class Binding:
    """SessionIOBinding."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)  # as pybind11's object, which does not keep the session
        self.inputs: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
        self.outputs: dict[str, Slot] = {}

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a binding is used after its session"
        return session

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        if value.is_tensor_sequence():
            self.inputs[name] = value, _SEQUENCES[id(value)][1]
            return
        cuda, session = self.session.cuda, self.session
        place = [(value.data_ptr(), _size(value))]
        here = cuda.memory.device_at(value.data_ptr())
        if here is not None and here != session.device:
            raise RuntimeError(f"{name} is on cuda:{here}, the session on cuda:{session.device}: an illegal memory access")
        planned = session.planned_inputs.get(name, CUDA)
        if (planned == CUDA) == (here is not None) or not place[0][1]:
            self.inputs[name] = value, place
            return
        if here is not None:
            cuda.machine.launch(session.stream, place, [], f"copy of {name} at its binding")
        cuda.machine.wait(session.stream, f"copy of {name} at its binding")
        copied = torch.utils.dlpack.from_dlpack(value.to_dlpack()).clone()
        kept = ort.OrtValue.from_dlpack(torch._C._to_dlpack(copied), value.data_type() == "tensor(bool)")
        self.inputs[name] = kept, [span(copied)]

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        place = (value.data_ptr(), _size(value))
        device = CUDA if self.session.cuda.memory.device_at(place[0]) is not None else CPU
        self.outputs[name] = Slot(value, device, [place])

    def bind_output(self, name: str, device: Any) -> None:
        kind = CUDA if device.device_type() == ort.OrtDevice.cuda() else PINNED if memory_type(device) == 1 else CPU
        slot = Slot(None, kind, [])
        self.outputs[name] = slot

    def get_outputs(self) -> list[Any]:
        return [slot.value for slot in self.outputs.values()]


def memory_type(device: Any) -> int:
    """The second of OrtDevice's three bytes, which Python does not show."""
    address = ctypes.c_void_p.from_address(id(device) + object.__basicsize__).value or 0
    return int(ctypes.c_int8.from_address(address + 1).value)


def plan(model: bytes | str, real: Any) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The devices that ONNX Runtime plans for inputs and outputs, and the nodes that run on the CPU."""
    names = [value.name for value in real.get_inputs()]
    inputs, outputs = dict.fromkeys(names, CUDA), {value.name: CUDA for value in real.get_outputs()}
    if isinstance(model, str) and model.endswith(".ort"):
        inputs |= {name: CPU for name in names if name in ("lazy_reset_grad", "learning_rate", "step")}
        outputs |= {name: PINNED for name in outputs if name.endswith((".accumulation.out", "update_completed", "updated_flag"))}
        return inputs, outputs, []
    graph = (onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)).graph
    fallen = []
    for node in graph.node:
        alone = node.op_type in CPU_ONLY
        if alone and node.op_type not in fallen:
            fallen.append(node.op_type)
        for place, name in enumerate(node.input):
            if name in inputs and (alone or place in _CPU_INPUTS.get(node.op_type, ())):
                inputs[name] = CPU
        for place, name in enumerate(node.output):
            if name in outputs and alone:
                outputs[name] = CPU
            elif name in outputs and place == 0 and node.op_type in _PINNED_OUTPUTS:
                outputs[name] = PINNED
    return inputs, outputs, fallen


_SEQUENCES: dict[int, tuple[Any, list[tuple[int, int]]]] = {}


def patch(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Put the model in place of ONNX Runtime's sessions on CUDA; returns the sessions as they are made."""
    made: list[Session] = []
    real_session, real_binding = onnxruntime.InferenceSession, ort.SessionIOBinding
    sequence, place = sequences._Api.sequence, sequences._Api.place
    pending: list[list[tuple[int, int]]] = []

    def session(model: bytes | str, settings: Any = None, providers: Any = (), **_: Any) -> Any:
        real = real_session(model, settings, providers=["CPUExecutionProvider"])
        first = providers[0] if providers else "CPUExecutionProvider"
        if not isinstance(first, tuple) or first[0] != PROVIDER:
            return real
        made.append(Session(cuda, real, model, first[1]))
        return made[-1]

    def binding(inner: Any) -> Any:
        return Binding(inner) if isinstance(inner, Session) else real_binding(inner)

    def recorded(api: Any, pieces: Any, *device: Any) -> int:
        pending.append([(address, 4 * count) for address, count in pieces])
        return sequence(api, pieces, *device)

    def placed(api: Any, pointer: int, value: Any) -> None:
        _SEQUENCES[id(value)] = value, pending.pop()
        place(api, pointer, value)

    binding.real = real_binding  # type: ignore[attr-defined]
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER, "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "SessionIOBinding", binding)
    monkeypatch.setattr(sequences._Api, "sequence", recorded)
    monkeypatch.setattr(sequences._Api, "place", placed)
    return made


def _size(value: Any) -> int:
    size = 1
    for length in value.shape():
        size *= length
    return size * torch.utils.dlpack.from_dlpack(value.to_dlpack()).element_size() if size else 0


def _bytes(spans: list[tuple[int, int]]) -> bytes:
    return b"".join(ctypes.string_at(start, size) for start, size in spans if size)

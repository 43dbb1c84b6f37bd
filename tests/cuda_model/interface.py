"""`torch.cuda` for the model: streams, events, devices, and the modes that make tensors live on them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack

from .kernels import Functions, Kernels
from .machine import Machine, Timeline, index_of
from .memory import ARENA, Memory


class Cuda:
    """The machine, its memory and the modes; `patch` puts them in place of `torch.cuda`."""

    def __init__(self, devices: int = 2) -> None:
        self.machine = Machine(devices)
        self.memory = Memory(self.machine)
        self.functions = Functions(self.machine, self.memory)
        self.kernels = Kernels(self.functions)
        self.seeds = [torch.full((16,), index, dtype=torch.uint8) for index in range(devices)]

    @property
    def waits(self) -> list[str]:
        return self.machine.waits

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        with self.kernels, self.functions:
            yield

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Nothing inside may wait for a device."""
        before = len(self.waits)
        yield
        assert self.waits[before:] == [], f"the host waited: {self.waits[before:]}"

    def _backward(self, apply: Any) -> Any:
        """Python code of a backward runs inside `Tensor.backward`, during which the mode that saw that call is off."""

        def with_functions(context: Any, *args: Any) -> Any:
            if self.functions in _get_current_function_mode_stack():
                return apply(context, *args)
            with self.functions:
                return apply(context, *args)

        return with_functions

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine, model = self.machine, self

        class Event:
            """As `torch.cuda.Event`."""

            def __init__(self, **_: Any) -> None:
                self.clock: dict[Timeline, int] = {}

            def record(self, stream: Any = None) -> None:
                line = machine.current_stream(machine.current_device) if stream is None else stream.timeline
                line.join(machine.host.clock)
                self.clock = dict(line.clock)

            def wait(self, stream: Any = None) -> None:
                line = machine.current_stream(machine.current_device) if stream is None else stream.timeline
                line.join(self.clock)

            def synchronize(self) -> None:
                machine.waits.append("event.synchronize")
                machine.host.join(self.clock)
                machine.arrive()

            def query(self) -> bool:
                return all(machine.host.clock.get(line, 0) >= count for line, count in self.clock.items())

        class Stream:
            """As `torch.cuda.Stream`; every one is non-blocking: nothing orders it with the default stream."""

            def __init__(self, device: Any = None, priority: int = 0, timeline: Timeline | None = None, **_: Any) -> None:
                self.timeline: Timeline = timeline or machine.new_stream(index_of(device, machine), "side stream")
                self.device = torch.device("cuda", index_of(self.timeline.device, machine))
                self.cuda_stream = self.timeline.handle

            def wait_stream(self, other: Stream) -> None:
                other.timeline.join(machine.host.clock)
                self.timeline.join(other.timeline.clock)

            def wait_event(self, event: Event) -> None:
                self.timeline.join(event.clock)

            def record_event(self, event: Event | None = None) -> Event:
                event = event or Event()
                event.record(self)
                return event

            def synchronize(self) -> None:
                machine.wait(self.timeline, "stream.synchronize")

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.timeline is self.timeline

            def __hash__(self) -> int:
                return hash(id(self.timeline))

        class Device:
            """As `torch.cuda.device`."""

            def __init__(self, device: Any) -> None:
                self._index = index_of(device, machine)

            def __enter__(self) -> None:
                self._before = machine.current_device
                machine.set_device(self._index)

            def __exit__(self, *_: object) -> None:
                machine.set_device(self._before)

        def synchronize(device: Any = None) -> None:
            machine.waits.append("torch.cuda.synchronize")
            for line in [machine.defaults[index_of(device, machine)], *machine.by_handle.values()]:
                if line.device == index_of(device, machine):
                    machine.host.join(line.clock)
            machine.arrive()

        def set_states(states: Any) -> None:
            for index, state in enumerate(states):
                self.seeds[index] = state

        patches: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: machine.devices,
            "current_device": lambda: machine.current_device,
            "set_device": lambda device: machine.set_device(index_of(device, machine)),
            "device": Device,
            "Stream": Stream,
            "Event": Event,
            "stream": lambda stream: machine.using(stream.timeline) if stream is not None else contextlib.nullcontext(),
            "current_stream": lambda device=None: Stream(timeline=machine.current_stream(index_of(device, machine))),
            "default_stream": lambda device=None: Stream(timeline=machine.defaults[index_of(device, machine)]),
            "synchronize": synchronize,
            "is_current_stream_capturing": lambda: machine.capturing,
            "get_device_name": lambda device=None: "model",
            "memory_allocated": lambda device=None: self.memory.live_bytes(index_of(device, machine)),
            "mem_get_info": lambda device=None: (ARENA - self.memory.live_bytes(index_of(device, machine)), ARENA),
            "set_sync_debug_mode": lambda mode: setattr(machine, "refuses_waits", mode == "error"),
            "get_rng_state_all": lambda: [seed.clone() for seed in self.seeds],
            "set_rng_state_all": set_states,
            "get_rng_state": lambda device=None: self.seeds[index_of(device, machine)].clone(),
            "set_rng_state": lambda state, device=None: self.seeds.__setitem__(index_of(device, machine), state),
        }
        for name, value in patches.items():
            monkeypatch.setattr(torch.cuda, name, value)
        # PyTorch's parser of arguments refuses other classes of streams before a mode sees the call.
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.memory.record(tensor, stream.timeline))
        monkeypatch.setattr(BackwardCFunction, "apply", self._backward(BackwardCFunction.apply))
        run = threading.Thread.run

        def in_modes(thread: threading.Thread) -> None:
            with model.modes():
                run(thread)

        monkeypatch.setattr(threading.Thread, "run", in_modes)

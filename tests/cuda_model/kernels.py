"""PyTorch's operators as launches on the current stream of the model's devices.

Two modes of PyTorch do it. The outer one sees the functions that are called: it answers `tensor.device` by the tensor's address and takes
CUDA devices out of arguments, which this build of PyTorch refuses. The inner one sees every operator, those of autograd too: it declares
what is read and written, refuses to mix devices, counts waits and puts results into device memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .machine import Machine, Mixed, Race, Timeline
from .memory import Memory, span

_WAITING = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim"}
)
"""Operators whose result the host needs: its value, or its size."""
_COPIES = frozenset({"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize", "_foreach_copy_"})
POISON = 0xEE

_get = {name: getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}


class Functions(TorchFunctionMode):
    """The functions that are called: devices in arguments and attributes."""

    def __init__(self, machine: Machine, memory: Memory) -> None:
        super().__init__()
        self.machine, self.memory = machine, memory
        self.local = threading.local()

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        found = self.memory.device_of(tensor) if tensor.layout is torch.strided and not tensor.is_meta else None
        return torch.device("cuda", found) if found is not None else None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.device, torch._C._nn._parse_to):
            return function(*args, **kwargs)
        for name, getter in _get.items():
            if function == getter:
                return self._attribute(name, args[0], function)
        own = getattr(self, f"_{getattr(function, '__name__', '').strip('_')}", None)
        if own is not None and args and isinstance(args[0], torch.Tensor):
            return own(function, *args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return self._pin(function(*args, **kwargs))
        return self._with_device(function, args, kwargs)

    def _attribute(self, name: str, tensor: torch.Tensor, getter: Any) -> Any:
        device = self.device(tensor)
        if device is None:
            return getter(tensor)
        return {"device": device, "is_cuda": True, "is_cpu": False}[name]

    def _to(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (self.device(args[0]) or args[0].device, args[0].dtype, *args[1:])
        copy = bool(kwargs.pop("copy", False)) or (len(args) > 3 and bool(args[3]))
        device, args, kwargs = self._taken(args, kwargs)
        if device is None:
            return function(tensor, *args, **kwargs, copy=copy)
        moved = device != (self.device(tensor) or torch.device("cpu"))
        with self._target(device):
            return function(tensor, *args, **kwargs, copy=copy or moved)

    def _cuda(self, _: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
        index = torch.device("cuda", device).index if isinstance(device, int) else None
        place = torch.device(device) if device is not None and index is None else torch.device("cuda", index or self.machine.current_device)
        return self._to(torch.Tensor.to, tensor, place, non_blocking=non_blocking)

    def _cpu(self, _: Any, tensor: torch.Tensor) -> torch.Tensor:
        return self._to(torch.Tensor.to, tensor, torch.device("cpu"))

    def _numpy(self, function: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if self.device(tensor) is not None:
            raise TypeError("can't convert a CUDA tensor to numpy")
        return function(tensor, **kwargs)

    def _array(self, function: Any, tensor: torch.Tensor, *args: Any) -> Any:
        return self._numpy(function, tensor) if not args else function(tensor, *args)

    def _tolist(self, function: Any, tensor: torch.Tensor) -> Any:
        if self.device(tensor) is not None:
            tensor = self._cpu(None, tensor)
        return function(tensor)

    def _pin_memory(self, _: Any, tensor: torch.Tensor, *__: Any) -> torch.Tensor:
        return self._pin(tensor.clone())

    def _is_pinned(self, _: Any, tensor: torch.Tensor, *__: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in self.memory.pinned_addresses

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.memory.pinned_addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _with_device(self, function: Any, args: Any, kwargs: Any) -> Any:
        device, args, kwargs = self._taken(args, kwargs)
        if device is None:
            with _Among(self.local, self._first_device([*args, *kwargs.values()])):
                return function(*args, **kwargs)
        with self._target(device):
            return function(*args, **kwargs)

    def _first_device(self, values: list[Any]) -> torch.device | None:
        return next((device for value in _tensors(values) if (device := self.device(value)) is not None), None)

    def _taken(self, args: Any, kwargs: Any) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
        """The device among the arguments, and the arguments with the CPU in its place."""
        found: list[torch.device] = []

        def one(value: Any, named: bool = False) -> Any:
            given: torch.device | None = value if isinstance(value, torch.device) else None
            if isinstance(value, str) and (named or value.startswith("cuda")):
                given = torch.device(value)
            elif isinstance(value, int) and not isinstance(value, bool) and named:
                given = torch.device("cuda", value)
            if given is None or given.type not in ("cpu", "cuda"):
                return value
            if given == torch.device("cuda"):
                given = torch.device("cuda", self.machine.current_device)
            found.append(given)
            return torch.device("cpu")

        args = tuple(one(value) for value in args)
        kwargs = {name: one(value, name == "device") if name == "device" else value for name, value in kwargs.items()}
        return found[0] if found else None, args, kwargs

    def _target(self, device: torch.device) -> _Target:
        return _Target(self.local, device)

    @property
    def target(self) -> torch.device | None:
        return getattr(self.local, "device", None)

    @property
    def among(self) -> torch.device | None:
        """Where PyTorch's own code, inside the call in progress, makes new tensors: with those it was given."""
        return getattr(self.local, "among", None)


class _Target:
    """The device that the call in progress names."""

    def __init__(self, local: threading.local, device: torch.device) -> None:
        self._local, self._device = local, device

    def __enter__(self) -> None:
        self._before = getattr(self._local, "device", None)
        self._local.device = self._device

    def __exit__(self, *_: object) -> None:
        self._local.device = self._before


class _Among:
    """The device of the tensors that the call in progress was given."""

    def __init__(self, local: threading.local, device: torch.device | None) -> None:
        self._local, self._device = local, device

    def __enter__(self) -> None:
        self._before = getattr(self._local, "among", None)
        self._local.among = self._device

    def __exit__(self, *_: object) -> None:
        self._local.among = self._before


class Kernels(TorchDispatchMode):
    """Every operator."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self.functions, self.machine, self.memory = functions, functions.machine, functions.memory
        self.seen: dict[str, int] = {}
        """Operators on device tensors, and how often."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        tensors = list(_tensors([*args, *kwargs.values()]))
        devices = {index for value in tensors if (index := self._index(value)) is not None}
        target = self.functions.target
        if target is None and not tensors:  # PyTorch's own code gives the options of a tensor, which name the CPU here
            target = self.functions.among
        place = devices.copy() if target is None else ({target.index} if target.type == "cuda" else set())
        if not devices and not place:
            return function(*args, **kwargs)
        if name in _COPIES and (len(devices) > 1 or self._crosses(tensors, devices, target)):
            return self._copied(function, name, args, kwargs, tensors, target)
        self._refuse_mixed(name, tensors, devices)
        if function.is_view:
            return function(*args, **kwargs)
        index = next(iter(place or devices))
        stream = self.machine.current_stream(index)
        self.seen[name] = self.seen.get(name, 0) + 1
        reads, writes = _accesses(function, args, kwargs)
        _refuse_twice(name, function, args)
        self.machine.launch(stream, [span(value) for value in reads], [span(value) for value in writes], name)
        if name in _WAITING or (name in ("index", "index_put_", "index_put") and _has_mask(args[1])):
            self._wait(stream, name)
        result = function(*args, **kwargs)
        if target is not None and target.type == "cpu" and devices:
            return result
        return tree_map(lambda value: self._placed(value, tensors, stream, name), result)

    def _wait(self, stream: Timeline, why: str) -> None:
        if self.machine.refuses_waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.machine.wait(stream, why)

    def _index(self, tensor: torch.Tensor) -> int | None:
        return self.memory.device_of(tensor) if tensor.layout is torch.strided and not tensor.is_meta else None

    def _crosses(self, tensors: list[torch.Tensor], devices: set[int], target: torch.device | None) -> bool:
        """Whether a copy goes between the host and a device, or between two devices."""
        if target is not None:
            return {target.index if target.type == "cuda" else None} != {self._index(value) for value in tensors}
        return len({self._index(value) for value in tensors}) > 1

    def _refuse_mixed(self, name: str, tensors: list[torch.Tensor], devices: set[int]) -> None:
        if len(devices) > 1:
            raise Mixed(f"{name}: tensors on {sorted(devices)}")
        if devices and any(self._index(value) is None and value.ndim > 0 for value in tensors):
            raise Mixed(f"{name}: a tensor on the CPU among tensors on cuda")

    def _placed(self, value: Any, given: list[torch.Tensor], stream: Timeline, name: str) -> Any:
        """A result in device memory."""
        if not isinstance(value, torch.Tensor) or self._index(value) is not None:
            return value
        made = self.memory.like(value, stream)
        self.machine.launch(stream, [], [span(made)], name)
        return made

    def _copied(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor], target: torch.device | None) -> Any:
        """A copy between the host and a device, or between two devices."""
        if name == "_foreach_copy_":
            for destination, source in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(torch.ops.aten.copy_.default, (), (destination, source, *args[2:]), kwargs)
            return None
        if name == "_to_copy":
            source = args[0]
            index = target.index if target is not None and target.type == "cuda" else None
            made = function(*args, **kwargs)
            destination = made if index is None else self.memory.like(made, self.machine.current_stream(index))
        else:
            destination, source = args[0], args[1]
        asynchronous = bool(kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False))
        self._transfer(destination, source, asynchronous)
        return destination

    def _transfer(self, destination: torch.Tensor, source: torch.Tensor, asynchronous: bool) -> None:
        there, here = self._index(destination), self._index(source)
        stream = self.machine.current_stream(here if here is not None else there)  # type: ignore[arg-type]  # one of them is a device
        reads = [span(source)] if here is not None else []
        writes = [span(destination)] if there is not None else []
        self.machine.launch(stream, reads, writes, "copy")
        if here is not None and there is not None and here != there:
            other = self.machine.current_stream(there)  # PyTorch orders a copy between devices with both current streams
            other.join(stream.clock)
        host = destination if there is None else source
        if here is not None and there is not None:
            destination.copy_(source)
            return
        if not asynchronous or host.untyped_storage().data_ptr() not in self.memory.pinned_addresses:
            destination.copy_(source)
            self._wait(stream, "copy to the host" if there is None else "copy from the host")
            return
        value = source.clone()
        if there is not None:
            destination.copy_(value)
            return
        flat = destination.reshape(-1).view(torch.uint8) if destination.is_contiguous() else None
        if flat is not None:
            flat.fill_(POISON)
        self.machine.deferred.append((stream, stream.clock[stream], partial(_copy, destination, value)))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _accesses(function: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads, and those that it writes, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        value = kwargs.get(argument.name) if place >= len(args) or argument.kwarg_only else args[place]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(_tensors([value]))
    return reads, writes


def _refuse_twice(name: str, function: Any, args: Any) -> None:
    """A kernel over a list of tensors treats them at once: one that stands in it twice loses an update."""
    for argument, value in zip(function._schema.arguments, args, strict=False):
        if isinstance(value, (list, tuple)) and argument.alias_info is not None and argument.alias_info.is_write:
            places = [span(tensor)[0] for tensor in value if tensor.numel()]
            if len(set(places)) < len(places):
                raise Race(f"{name}: a tensor stands twice in a list that is written")


def _has_mask(indices: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) for value in indices)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)

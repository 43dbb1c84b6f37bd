"""Whether an exported graph computes what its module does, also at other sizes than the example's.

A tracer can hard-code the example's sizes in a graph whose inputs are declared dynamic, or fix a dimension requested as dynamic.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import torch
from torch import nn

from ...errors import UnsupportedError
from ...storage.paths import PathLike
from ..description import all_nodes, copy_of, is_random
from ..limits import refuse_wrong
from ..passes.running_statistics import use_running_statistics

Inputs = Mapping[str, torch.Tensor]
Dynamic = Mapping[str, Mapping[int, str]]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_log = logging.getLogger(__name__)


def refuse_fixed(model: onnx.ModelProto, dynamic: Dynamic, path: PathLike | None = None) -> None:
    """Check that every dimension requested as dynamic is symbolic in the graph's inputs."""
    for value in model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        for axis, name in dynamic.get(value.name, {}).items():
            if sizes[axis].HasField("dim_value"):
                raise _fixed(name, f"axis {axis} of input {value.name!r} came out as {sizes[axis].dim_value}", path)


def check_dynamic(model: onnx.ModelProto, module: nn.Module, inputs: Inputs, dynamic: Dynamic) -> None:
    """Run the graph and the module on the example, then with each dynamic dimension at another size, and compare."""
    refuse_fixed(model, dynamic)
    session = _session(model)
    if session is None:
        return
    random = is_random(model) or _computed_wrongly(model)
    try:
        difference = _difference(session, module, inputs, random)
    except _ModuleError as error:
        raise UnsupportedError(f"the module fails on the example inputs: {error}", remedy="Pass inputs that its forward takes.") from error
    if difference == _OTHER_VALUES and _normalises(model):
        random = True  # a batch normalisation that is not an nn.BatchNorm: its statistics can't be switched off in the module
    elif difference is not None:
        raise UnsupportedError(
            f"the exported graph does not compute what the module does: {difference}", remedy="Try the other exporter (exporter=)."
        )
    for name in sorted({name for sizes in dynamic.values() for name in sizes.values()}):
        for resized in _resized(inputs, dynamic, name):
            try:
                difference = _difference(session, module, resized, random)
            except _ModuleError as error:
                _log.info("dimension %r could not be checked at another size: the module fails there (%s)", name, error)
                continue
            if difference is not None:
                raise _fixed(name, f"at another size {difference}", None)
            break


def _computed_wrongly(model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime is known to compute wrong values for the graph: only its shapes can be compared then."""
    try:
        refuse_wrong(model)
    except UnsupportedError:
        return True
    return False


_OTHER_VALUES = "an output has different values"


class _ModuleError(Exception):
    """The module itself can't take these inputs."""


def _difference(session: Any, module: nn.Module, inputs: Inputs, random: bool) -> str | None:
    """How the graph's outputs differ from the module's, as text; None if they agree."""
    expected = _native(module, inputs)
    feeds = {value.name: inputs[value.name].detach().cpu().numpy() for value in session.get_inputs() if value.name in inputs}
    from ..onnxruntime_package import ort_errors

    try:
        found = session.run(None, feeds)
    except ort_errors() as error:
        return f"the graph fails ({str(error).strip().splitlines()[0][:200]})"
    for index, (ours, array) in enumerate(zip(expected, found, strict=False)):
        theirs = torch.from_numpy(array)
        if ours.shape != theirs.shape:
            return f"output {index} has shape {list(theirs.shape)} instead of {list(ours.shape)}"
        if not random and not _close(ours, theirs):
            return _OTHER_VALUES
    return None


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours.to(theirs.dtype), theirs)
    tolerance = 5e-2 if ours.dtype in (torch.float16, torch.bfloat16) else 1e-3
    ours, theirs = ours.double(), theirs.double()
    scale = float(ours[ours.isfinite()].abs().max()) if ours.isfinite().any() else 1.0
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _native(module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    twin = copy.deepcopy(module).cpu().train()
    for layer in twin.modules():
        if isinstance(layer, BATCH_NORMS):
            layer.eval()
    with torch.no_grad(), torch.random.fork_rng():
        try:
            result = twin(**{name: value.clone() for name, value in inputs.items()})
        except Exception as error:
            try:
                result = twin(*(value.clone() for value in inputs.values()))  # forward(*args)
            except Exception:
                raise _ModuleError(f"{type(error).__name__}: {error}") from error
    return list(_tensors(result))


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's result in the order in which exporters number them."""
    if isinstance(result, torch.Tensor):
        yield result.detach()
    elif isinstance(result, (list, tuple, Mapping)):
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from _tensors(part)


def _resized(inputs: Inputs, dynamic: Dynamic, name: str) -> Iterator[dict[str, torch.Tensor]]:
    """The inputs with the dimension one larger, then (for modules that need multiples) twice as large: the example repeats itself."""
    axes = [(key, axis) for key, sizes in dynamic.items() if key in inputs for axis, dim in sizes.items() if dim == name]
    for factor, more in ((1, 1), (2, 0)):
        resized = dict(inputs)
        for key, axis in axes:
            size = resized[key].shape[axis]
            places = torch.arange(factor * size + more, device=resized[key].device) % max(size, 1)
            resized[key] = resized[key].index_select(axis, places)
        yield resized


def _session(model: onnx.ModelProto) -> Any:
    """A session over the forward graph; None where this onnxruntime can't load the graph."""
    from ..onnxruntime_package import import_onnxruntime, ort_errors

    onnxruntime = import_onnxruntime()
    model = copy_of(model)
    use_running_statistics(model)
    try:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except ort_errors() as error:
        _log.info("the exported graph could not be checked: %s", error)
        return None


def _normalises(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "BatchNormalization" for node in all_nodes(model.graph))


def _fixed(name: str, found: str, path: PathLike | None) -> UnsupportedError:
    return UnsupportedError(
        f"dimension {name!r} was asked to be dynamic, but the module fixes it: {found}",
        path=path,
        remedy="Leave it out of dynamic_shapes (dynamic_shapes={} fixes all sizes), or make the forward independent of that size.",
    )

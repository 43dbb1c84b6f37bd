"""ONNX graph to `torch.fx.GraphModule`: slice the part that the wanted outputs need, then one torch call per node.

The module is a pure function: `forward(*inputs, *parameters)`. Whoever owns the parameters passes them in, so sharding, functional
transforms and autograd see ordinary tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from torch import fx, nn

from ...errors import CheckpointError, UnsupportedError
from ..description import DETACHED, ONNX_ERRORS, RANDOM_OPS, padding_row
from .constants import constant_value, identifier, read_attributes, read_tensor
from .host import Host, fold_host, host_constant
from .joins import join_linear
from .registry import Kind, Op, find_op

GRADIENT_OUTPUT = ".accumulation.out"
GRADIENT_BUFFER = ".accumulation.buffer"
LAZY_RESET = "lazy_reset_grad"
MAX_FOLDED = 4096
"""Constants with more elements are not computed with at translation: that would keep two of them."""
_DEVICE = "$device"
_HOST_NAMES = {"ConcatTraining": "Concat"}
"""ORT renames operators when it builds gradients, those of shape arithmetic too."""
_CONTROL_FLOW = ("If", "Loop", "Scan")


@dataclass(frozen=True)
class Translation:
    """The module and the ONNX names behind its arguments and results."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]


def translate(
    model: onnx.ModelProto,
    *,
    parameters: Iterable[str] = (),
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
) -> Translation:
    """Translate what `outputs` need (default: every graph output but the gradients) of a training, eval or inference graph.

    `parameters` are the graph inputs or initializers that the caller will pass after the user inputs, in this order; those that the
    graph does not use are left out. Other initializers become constants of the module. The user inputs are the graph's, those that the
    named `outputs` need, or `inputs`: any values of the graph, whose computation is then left out."""
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (*ONNX_ERRORS, ValueError, RuntimeError) as error:
            raise UnsupportedError(f"its functions can't be inlined ({error})", remedy="Export the model without functions.") from error
    graph = model.graph
    wanted = forward_outputs(model) if outputs is None else list(outputs)
    nodes, needed = slice_graph(graph, wanted, inputs or ())
    order = list(parameters)
    given = [value.name for value in graph.input]
    constants = {tensor.name for tensor in graph.initializer}
    if inputs is None:
        free = [name for name in given if name not in constants and name not in order]
        inputs = [name for name in free if (name in needed if outputs is not None else not _is_ort_s(name))]
    known = {*given, *constants, *inputs, *(name for node in nodes for name in node.output)}
    if missing := sorted(needed - known):
        raise CheckpointError(
            f"the graph has no value named {missing[0]!r}",
            field="outputs",
            remedy="Names of values are in the .onnx file: onnx.load(path).graph.",
        )
    builder = GraphBuilder({entry.domain: entry.version for entry in model.opset_import})
    used = [name for name in order if name in needed and name not in inputs]
    for name in (*inputs, *used):
        builder.add_input(name)
    for tensor in graph.initializer:
        if tensor.name in needed and tensor.name not in used:
            builder.add_constant(tensor.name, read_tensor(tensor))
    builder.add_nodes(nodes)
    module = builder.finish(wanted)
    shapes = _fixed_shapes(graph)
    join_linear(module, {builder.values[name].name: shapes[name] for name in used if name in shapes})
    return Translation(module, tuple(inputs), tuple(used), tuple(wanted))


def forward_outputs(model: onnx.ModelProto) -> list[str]:
    """The loss and the extra outputs: all graph outputs but the accumulated gradients."""
    return [value.name for value in model.graph.output if not value.name.endswith(GRADIENT_OUTPUT)]


def slice_graph(graph: onnx.GraphProto, outputs: Iterable[str], given: Iterable[str] = ()) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that `outputs` need when `given` is known, in order, and every value they read."""
    needed, known = set(outputs), set(given)
    nodes = []
    for node in reversed(graph.node):
        if needed.intersection(node.output).difference(known):
            nodes.append(_without_unused_outputs(node, needed))
            needed.update(name for name in (*node.input, *_captured(node)) if name)
    return nodes[::-1], needed


@dataclass
class GraphBuilder:
    """Adds ONNX nodes to an fx graph. A subgraph's builder has an `outer` one, whose values it captures as extra inputs."""

    opsets: Mapping[str, int]
    outer: GraphBuilder | None = None
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    values: dict[str, Any] = field(default_factory=dict)
    captured: list[Any] = field(default_factory=list)
    _last_input: fx.Node | None = None
    _names: set[str] = field(default_factory=set)

    def add_input(self, name: str, rank: int | None = None, dtype: torch.dtype = torch.int64) -> fx.Node:
        """A placeholder; with `rank`, one that will receive Python numbers."""
        text = base = identifier(name)
        count = 1
        while text in self._names:
            text, count = f"{base}_{count}", count + 1
        self._names.add(text)
        with (
            self.graph.inserting_after(self._last_input)
            if self._last_input
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        ):
            node = self.graph.placeholder(text)
        self._last_input = node
        self.values[name] = node if rank is None else Host(node, rank, dtype)
        return node

    def add_constant(self, name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(value, np.ndarray):
            raise UnsupportedError("string tensors can't enter a torch graph", field=name)
        self.values[name] = host_constant(value) or self._buffer(name, value)

    def add_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            where = f"node {node.name or node.output[0]!r}"
            if node.op_type == "Constant" and not node.domain:
                self.add_constant(node.output[0], constant_value(node))
            elif node.op_type == "Identity" and not node.domain:
                self.values[node.output[0]] = self._detached(node.input[0]) if node.doc_string == DETACHED else self.value(node.input[0])
            elif node.op_type in _CONTROL_FLOW and not node.domain:
                from .control_flow import add_control_flow

                self._store(node, add_control_flow(self, node, read_attributes(node)))
            else:
                self._add(node, where)

    def _detached(self, name: str) -> Any:
        """The value without a gradient; numbers that are known have none anyway."""
        value = self.value(name)
        return value if isinstance(value, Host) else self.graph.call_function(torch.detach, (value,))

    def value(self, name: str) -> Any:
        """The `Host` or graph node of an ONNX value; None for an input left out."""
        if not name:
            return None
        if name not in self.values:
            if self.outer is None:
                raise CheckpointError(
                    f"no node, input or initializer provides {name!r}", field=name, remedy="The graph is not in topological order."
                )
            value = self.outer.device() if name == _DEVICE else self.outer.value(name)
            if isinstance(value, Host) and value.constant:
                return value
            self.add_input(name, *((value.rank, value.dtype) if isinstance(value, Host) else ()))
            self.captured.append(value.value if isinstance(value, Host) else value)
        return self.values[name]

    def tensor(self, name: str) -> Any:
        """The value as a tensor's node."""
        value = self.value(name)
        if not isinstance(value, Host):
            return value
        if value.constant:
            known = f"{name}$tensor"
            if known not in self.values:
                self.values[known] = self._buffer(name, torch.tensor(value.value, dtype=value.dtype))
            return self.values[known]
        return self.graph.call_function(torch.tensor, (value.value,), {"dtype": value.dtype, "device": self.device()})

    def device(self) -> Any:
        """The device of the model: that of its first tensor input."""
        if self.outer is not None:
            return self.value(_DEVICE)
        if _DEVICE not in self.values:
            first = next((node for node in self.graph.nodes if node.op == "placeholder"), None)
            if first is None:
                return torch.device("cpu")
            with self.graph.inserting_after(self._last_input or first):
                self.values[_DEVICE] = self.graph.call_function(getattr, (first, "device"))
        return self.values[_DEVICE]

    def finish(self, outputs: Sequence[str], *, host: Sequence[int] = ()) -> fx.GraphModule:
        """Close the graph. Results are a tuple; those at the positions in `host` may stay Python numbers."""
        results = []
        for place, name in enumerate(outputs):
            value = self.value(name)
            results.append(value.value if isinstance(value, Host) and place in host else self.tensor(name))
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph, class_name="OnnxGraph")
        for name, value in list(
            module.named_buffers(recurse=False, remove_duplicate=False)
        ):  # GraphModule forgets that they are not part of a state dict
            module.register_buffer(name, value, persistent=False)
        return module

    def submodule(self, module: nn.Module) -> fx.Node:
        name = f"branch_{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.graph.get_attr(name)

    def _buffer(self, name: str, value: torch.Tensor) -> fx.Node:
        text = identifier(name)
        while hasattr(self.root, text):
            text += "_"
        self.root.register_buffer(text, value.contiguous(), persistent=False)
        return self.graph.get_attr(text)

    def _add(self, node: onnx.NodeProto, where: str) -> None:
        attributes = read_attributes(node)
        if (row := padding_row(node)) is not None:
            attributes["padding_idx"] = row
        op = find_op(node.domain if node.domain != "ai.onnx" else "", node.op_type, self.opsets.get(node.domain, 1), where)
        inputs = [self.value(name) for name in node.input]
        name = node.op_type if not node.domain else _HOST_NAMES.get(node.op_type, "")
        if len(node.output) == 1 and (host := fold_host(self.graph, name, inputs, attributes)) is not None:
            self.values[node.output[0]] = host
            return
        args = [self._argument(op, place, name, self._beside_tensor(op, inputs)) for place, name in enumerate(node.input)]
        while args and args[-1] is None:
            args.pop()
        if op.keywords is not None:
            if len(args) > len(op.kinds) and not op.variadic:
                raise UnsupportedError(
                    f"{node.op_type}: input {len(op.kinds)} ({node.input[len(op.kinds)]!r}) is not supported",
                    field=where,
                    remedy='Use engine="ort", or replace the operator with torch_ort_ckpt.register_op.',
                )
            if unknown := [name for name in attributes if not op.takes(name)]:
                raise UnsupportedError(
                    f"{node.op_type}: the attribute {unknown[0]!r} is not supported",
                    field=where,
                    remedy='Use engine="ort", or replace the operator with torch_ort_ckpt.register_op.',
                )
            if "outputs" in op.keywords:
                attributes["outputs"] = len(node.output)
            if "number_dtype" in op.keywords:
                attributes["number_dtype"] = next((value.dtype for value in inputs if isinstance(value, Host)), None)
            if "device" in op.keywords:
                attributes["device"] = self.device()
        _unpack_numbers(op, attributes)
        if (known := self._constants(node, args)) is not None:
            result = _computed(op, known, attributes, where)
            if not isinstance(result, list):  # a sequence
                for name, value in zip(node.output, result if isinstance(result, tuple) else [result], strict=False):
                    self.add_constant(name, value)
                return
        self._store(node, self._call(op, args, attributes, node))

    def _constants(self, node: onnx.NodeProto, args: list[Any]) -> list[Any] | None:
        """The arguments' values if they are all small constants, so that the node can be computed once and for all."""
        if node.op_type in RANDOM_OPS or not args:
            return None
        known = []
        for arg in args:
            if isinstance(arg, fx.Node):
                if arg.op != "get_attr" or self.root.get_buffer(str(arg.target)).numel() > MAX_FOLDED:
                    return None
                known.append(self.root.get_buffer(str(arg.target)))
            elif isinstance(arg, (tuple, list)) and any(isinstance(part, fx.Node) for part in arg):
                return None
            else:
                known.append(arg)
        return known

    def _call(self, op: Op, args: list[Any], attributes: dict[str, Any], node: onnx.NodeProto) -> fx.Node:
        for name, value in list(attributes.items()):
            if isinstance(value, torch.Tensor):
                attributes[name] = self._buffer(f"{node.output[0]}_{name}", value)
        attributes = {name: value for name, value in attributes.items() if name not in op.defaults or not _same(op.defaults[name], value)}
        call = self.graph.create_node("call_function", op.function, tuple(args), attributes, name=identifier(node.output[0]))
        call.meta["onnx"] = f"{node.op_type} {node.name}".strip()
        return call

    def _store(self, node: onnx.NodeProto, result: Any) -> None:
        if isinstance(result, list):
            self.values.update(zip(node.output, result, strict=False))
        elif len(node.output) == 1:
            self.values[node.output[0]] = result
        else:
            for place, name in enumerate(node.output):
                if name:
                    self.values[name] = self.graph.call_function(operator.getitem, (result, place))

    def _beside_tensor(self, op: Op, inputs: Sequence[Any]) -> bool:
        """Whether one of the operands is a tensor, so that the others may be numbers."""
        return any(op.kind(place) is Kind.OPERAND and isinstance(value, fx.Node) for place, value in enumerate(inputs))

    def _argument(self, op: Op, place: int, name: str, beside_tensor: bool) -> Any:
        value = self.value(name)
        kind = op.kind(place)
        if isinstance(value, Host):
            number = value.rank == 0 and (kind is Kind.SCALAR or (kind is Kind.OPERAND and beside_tensor))
            return value.value if kind is Kind.HOST or number else self.tensor(name)
        if kind is Kind.HOST and value is not None:
            if value.op == "get_attr":
                return self.root.get_buffer(value.target).tolist()
            return self.graph.call_function(torch.Tensor.tolist, (value,))
        return value


def _unpack_numbers(op: Op, attributes: dict[str, Any]) -> None:
    """A tensor of one element as an attribute (a fill value) becomes a number, and its type another attribute if the function takes it."""
    for name, value in list(attributes.items()):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            if op.takes(f"{name}_dtype"):
                attributes[f"{name}_dtype"] = value.dtype
            attributes[name] = value.item()


def _computed(op: Op, args: list[Any], attributes: Mapping[str, Any], where: str) -> Any:
    """The operator's result on constants."""
    device = {"device": torch.device("cpu")} if op.takes("device") else {}
    try:
        return op.function(*args, **{**attributes, **device})
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise UnsupportedError(
            f"{op.name} can't be computed from its constant inputs ({str(error).strip().splitlines()[0]})",
            field=where,
            remedy='Check the node, or use engine="ort".',
        ) from error


def _fixed_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Of the graph's inputs and initializers, those without symbolic dimensions."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in graph.input:
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    return shapes


def _same(default: Any, value: Any) -> bool:
    return type(default) is type(value) and bool(default == value)


def _without_unused_outputs(node: onnx.NodeProto, needed: set[str]) -> onnx.NodeProto:
    """Drop trailing outputs that are never read, such as a Dropout's mask or a LayerNormalization's mean in the forward part."""
    used = max(place for place, name in enumerate(node.output) if name in needed) + 1
    if used == len(node.output):
        return node
    trimmed = onnx.NodeProto()
    trimmed.CopyFrom(node)
    del trimmed.output[used:]
    return trimmed


def _captured(node: onnx.NodeProto) -> set[str]:
    """Values of the enclosing graphs that the node's subgraphs read."""
    names: set[str] = set()
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            inside = {name for inner in attribute.g.node for name in (*inner.input, *_captured(inner))}
            inside.update(value.name for value in attribute.g.output)
            given = {value.name for value in attribute.g.input} | {tensor.name for tensor in attribute.g.initializer}
            names |= inside - given - {name for inner in attribute.g.node for name in inner.output}
    return names


def _is_ort_s(name: str) -> bool:
    return name.endswith(GRADIENT_BUFFER) or name == LAZY_RESET

"""Stage 6: the joint graph in the form that ONNX Runtime's training API takes, and back.

Inputs: the user's, then parameters and buffers, then an accumulation buffer for each gradient, then `lazy_reset_grad`. Outputs: the loss,
extra outputs, then a flag for each gradient. `InPlaceAccumulatorV2` adds a gradient to its buffer, or overwrites it.

No output can hold the new value of a buffer (BatchNorm's running statistics), so it is written over the old one by the same operator. The
loss is made to depend on the write: otherwise it would be removed as unused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from ...errors import UnsupportedError
from ..description import ACCUMULATION_BUFFER, ACCUMULATION_OUTPUT, COUNTERS, LAZY_RESET, reads

MICROSOFT = "com.microsoft"
WRITE = "InPlaceAccumulatorV2"
_ALWAYS = "always_overwrite"
_WRITTEN = ".written"


@dataclass(frozen=True)
class JointGraph:
    """Loss, extra outputs, gradients and new values of buffers as outputs of one ONNX graph of standard operators.

    `inputs` are the user's, `gradients` parameter -> output, `updates` buffer -> output with its new value. Everything else that the
    graph takes is a parameter or a buffer of that name.
    """

    model: onnx.ModelProto
    inputs: list[str]
    loss: str
    extras: list[str]
    gradients: dict[str, str]
    updates: dict[str, str] = field(default_factory=dict)


def training_model(joint: JointGraph, order: Sequence[str]) -> tuple[onnx.ModelProto, set[str]]:
    """The training model. Parameters and buffers are in the given order. Also returns the buffers that it takes as float32, because ONNX
    Runtime can write no others."""
    model = onnx.ModelProto()
    model.CopyFrom(joint.model)
    graph = model.graph
    values = {value.name: value for value in (*graph.input, *graph.output)}
    states = [value.name for value in graph.input if value.name not in joint.inputs]
    updates = dict(joint.updates)
    counters = _take_counters(model, updates)
    for name in [name for name in updates if name not in values]:  # overwritten before it is ever read
        values[name] = _renamed(values[updates[name]], name)
        states.append(name)
    kept = _needed(graph, [joint.loss, *joint.extras, *joint.gradients.values(), *updates.values()])
    _keep(graph.node, [graph.node[place] for place in sorted(kept)])
    used = {name for node in graph.node for name in reads(node)}
    states = [name for name in order if name in states and (name in used or name in joint.gradients or name in updates)]
    as_float = _float_counters(model, updates, values)
    flags = [_write(model, name, value) for name, value in updates.items()]
    if flags:
        _make_loss_wait(model, joint.loss, flags)
    trained = [name for name in order if name in joint.gradients]
    inputs = [values[name] for name in (*joint.inputs, *states)]
    outputs = [values[name] for name in (joint.loss, *joint.extras)]
    for name in trained:
        buffer, flag, gradient = name + ACCUMULATION_BUFFER, name + ACCUMULATION_OUTPUT, joint.gradients[name]
        graph.node.append(helper.make_node(WRITE, [buffer, gradient, LAZY_RESET], [flag], name=f"{name}.accumulate", domain=MICROSOFT))
        inputs.append(_renamed(values[name], buffer))
        outputs.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
    inputs.append(helper.make_tensor_value_info(LAZY_RESET, TensorProto.BOOL, [1]))
    _keep(graph.input, inputs)
    _keep(graph.output, outputs)
    graph.name = "training"
    _use_microsoft(model)
    _record(model, counters)
    return model, as_float


def joint_graph(model: onnx.ModelProto, inputs: Sequence[str]) -> JointGraph:
    """The joint graph behind a training model that `training_model` made. `inputs` are the user's."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    graph = plain.graph
    gradients: dict[str, str] = {}
    updates: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        if node.op_type == WRITE and node.input[0].endswith(ACCUMULATION_BUFFER):
            gradients[node.input[0].removesuffix(ACCUMULATION_BUFFER)] = node.input[1]
        elif node.op_type == WRITE:
            updates[node.input[0]] = node.input[1]
        else:
            nodes.append(node)
    loss = graph.output[0].name
    if updates:  # the loss no longer waits for anything
        waiting = next(node for node in nodes if loss in node.output)
        source = waiting.input[1]
        nodes = [node for node in nodes if not node.output[0].startswith(f"{loss}{_WRITTEN}") and node is not waiting]
        nodes.append(helper.make_node("Identity", [source], [loss]))
    shapes = {value.name: value for value in graph.input}
    extras = [value for value in graph.output[1:] if not value.name.endswith(ACCUMULATION_OUTPUT)]
    outputs = [graph.output[0], *extras]
    # A gradient is like its buffer: the parameter itself may be an input of another type (a half-precision alias).
    outputs += [_renamed(shapes[f"{name}{ACCUMULATION_BUFFER}"], value) for name, value in gradients.items()]
    outputs += [_renamed(shapes[name], value) for name, value in updates.items()]
    taken = [value for value in graph.input if not value.name.endswith(ACCUMULATION_BUFFER) and value.name != LAZY_RESET]
    for holder, found in ((graph.node, nodes), (graph.input, taken), (graph.output, outputs)):
        _keep(holder, found)
    _keep(plain.opset_import, [item for item in plain.opset_import if item.domain != MICROSOFT or any(n.domain for n in nodes)])
    return JointGraph(plain, list(inputs), loss, [value.name for value in extras], gradients, updates)


def _take_counters(model: onnx.ModelProto, updates: dict[str, str]) -> dict[str, int]:
    """Integer buffers that only count the steps are taken out of the updates: buffer -> how much it grows."""
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    found = {}
    for name in [name for name in updates if types.get(name) in (TensorProto.INT64, TensorProto.INT32)]:
        steps = _steps(graph, name, updates[name])
        if steps is not None:
            found[name] = steps
            del updates[name]
    return found


def _steps(graph: onnx.GraphProto, name: str, result: str) -> int | None:
    """How much `result` is larger than the input `name`, if that is a constant and nothing else reads either."""
    producers = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    total, chain = 0, set()
    while result != name:
        node = producers.get(result)
        if node is None:
            return None
        chain.add(node.output[0])
        if node.op_type == "Identity":
            result = node.input[0]
        elif node.op_type == "Add":
            numbers = [_number(value, producers, constants) for value in node.input]
            if numbers[0] is None and numbers[1] is not None:
                total, result = total + numbers[1], node.input[0]
            elif numbers[1] is None and numbers[0] is not None:
                total, result = total + numbers[0], node.input[1]
            else:
                return None
        else:
            return None
    if any(node.output[0] not in chain and ({name} | chain).intersection(reads(node)) for node in graph.node):
        return None
    return total


def _number(name: str, producers: Mapping[str, onnx.NodeProto], constants: Mapping[str, onnx.TensorProto]) -> int | None:
    """The value of a constant with one element."""
    while name in producers and producers[name].op_type in ("Cast", "Identity"):
        name = producers[name].input[0]
    tensor = constants.get(name)
    if tensor is None and name in producers and producers[name].op_type == "Constant":
        tensor = producers[name].attribute[0].t if producers[name].attribute[0].HasField("t") else None
    if tensor is None:
        return None
    array = onnx.numpy_helper.to_array(tensor)
    return int(array.reshape(-1)[0]) if array.size == 1 else None


def _float_counters(model: onnx.ModelProto, updates: dict[str, str], values: dict[str, onnx.ValueInfoProto]) -> set[str]:
    """Let buffers of whole numbers that the graph reads and changes be float32 outside it: ONNX Runtime's operator writes nothing else."""
    graph, changed = model.graph, set()
    before, after = [], []
    for name in list(updates):
        kind = values[name].type.tensor_type.elem_type
        if kind == TensorProto.FLOAT:
            continue
        if kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE):
            raise UnsupportedError(
                "ONNX Runtime's training API can't change a buffer that is not float32", field=name, remedy="Make it float32."
            )
        inside, outside = f"{name}.inside", f"{updates[name]}.float"
        before.append(helper.make_node("Cast", [name], [inside], to=kind))
        after.append(helper.make_node("Cast", [updates[name]], [outside], to=TensorProto.FLOAT))
        for node in graph.node:
            for place, read in enumerate(node.input):
                if read == name:
                    node.input[place] = inside
        updates[name] = outside
        values[name] = _renamed(values[name], name)
        values[name].type.tensor_type.elem_type = TensorProto.FLOAT
        changed.add(name)
    if changed:
        _keep(graph.node, [*before, *graph.node, *after])
    return changed


def _write(model: onnx.ModelProto, name: str, value: str) -> str:
    """Nodes that overwrite the buffer `name` with `value`; returns the flag that says it is done.

    ONNX Runtime may run the write before another node reads the old value. So if there is more than one reader, all of them read a
    copy, and the new value is made to come after the copy.
    """
    graph = model.graph
    readers = [place for place, node in enumerate(graph.node) if name in reads(node)]
    behind = _needed(graph, [value])
    if readers and (len(readers) > 1 or readers[0] not in behind):
        copy = f"{name}.before"
        for reader in readers:
            names = graph.node[reader].input
            names[:] = [copy if read == name else read for read in names]
        # Twice the negative is a copy that no optimizer removes.
        negative = f"{name}.negative"
        copying = [helper.make_node("Neg", [name], [negative]), helper.make_node("Neg", [negative], [copy])]
        _keep(graph.node, [*copying, *graph.node])
        if not behind.intersection(readers):
            value = _after(model, name, value, copy)
    if all(tensor.name != _ALWAYS for tensor in graph.initializer):
        graph.initializer.append(helper.make_tensor(_ALWAYS, TensorProto.BOOL, [1], [True]))
    flag = f"{name}{_WRITTEN}"
    graph.node.append(helper.make_node(WRITE, [name, value, _ALWAYS], [flag], name=f"{name}.write", domain=MICROSOFT))
    return flag


def _after(model: onnx.ModelProto, name: str, value: str, copy: str) -> str:
    """The value, computed in a way that needs `copy` too: both are joined and the first part is taken."""
    graph, prefix = model.graph, f"{name}.after"
    sizes = {item.name: [size.dim_value for size in item.type.tensor_type.shape.dim] for item in graph.input}[name]
    count = math.prod(sizes)
    for suffix, numbers in (("flat", [-1]), ("start", [0]), ("end", [count]), ("shape", sizes)):
        graph.initializer.append(helper.make_tensor(f"{prefix}.{suffix}", TensorProto.INT64, [len(numbers)], numbers))
    graph.node.append(helper.make_node("Reshape", [value, f"{prefix}.flat"], [f"{prefix}.value"]))
    graph.node.append(helper.make_node("Reshape", [copy, f"{prefix}.flat"], [f"{prefix}.copy"]))
    graph.node.append(helper.make_node("Concat", [f"{prefix}.value", f"{prefix}.copy"], [f"{prefix}.both"], axis=0))
    graph.node.append(helper.make_node("Slice", [f"{prefix}.both", f"{prefix}.start", f"{prefix}.end"], [f"{prefix}.first"]))
    graph.node.append(helper.make_node("Reshape", [f"{prefix}.first", f"{prefix}.shape"], [prefix]))
    return prefix


def _make_loss_wait(model: onnx.ModelProto, loss: str, flags: Sequence[str]) -> None:
    """Let the loss depend on the flags without a change to its value: a choice between it and itself."""
    graph = model.graph
    source, done = f"{loss}.value", f"{loss}{_WRITTEN}"
    while any(source in node.output for node in graph.node):
        source += "_"
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == loss:
                    names[place] = source
    graph.initializer.append(helper.make_tensor(f"{done}.shape", TensorProto.INT64, [0], []))
    graph.node.append(helper.make_node("And", [flags[0], flags[0]], [f"{done}.0"]))
    for place, flag in enumerate(flags[1:]):
        graph.node.append(helper.make_node("And", [f"{done}.{place}", flag], [f"{done}.{place + 1}"]))
    graph.node.append(helper.make_node("Reshape", [f"{done}.{len(flags) - 1}", f"{done}.shape"], [f"{done}.all"]))
    graph.node.append(helper.make_node("Where", [f"{done}.all", source, source], [loss]))


def _needed(graph: onnx.GraphProto, outputs: Sequence[str]) -> set[int]:
    """The places of the nodes that these values need."""
    wanted, found = set(outputs), set()
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if wanted.intersection(node.output):
            found.add(place)
            wanted.update(name for name in reads(node) if name)
    return found


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    return copy


def _keep(field: object, values: Sequence[object]) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]  # type: ignore[attr-defined]  # protobuf messages
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


def _record(model: onnx.ModelProto, counters: Mapping[str, int]) -> None:
    """Add the counters to those that the graph's metadata has already."""
    known = [entry for entry in model.metadata_props if entry.key == COUNTERS]
    found = {**counters, **{name: steps for entry in known for name, steps in json.loads(entry.value).items()}}
    _keep(model.metadata_props, [entry for entry in model.metadata_props if entry.key != COUNTERS])
    if found:
        model.metadata_props.add(key=COUNTERS, value=json.dumps(found))


def _use_microsoft(model: onnx.ModelProto) -> None:
    if all(item.domain != MICROSOFT for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))

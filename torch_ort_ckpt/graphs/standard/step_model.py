"""`export_step_model`: one ONNX graph that trains, for any runtime and language, and the state it starts from.

The graph takes the batch, every state tensor `X` (parameters, buffers, moments), the rate `lr` and `step` (1 for the first update), and
returns the loss, extra outputs and `X.new` for every `X`: a training loop feeds each result back as the next input. It has standard
operators only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...checkpoint.state import OptimizerSpec
from ...errors import CheckpointError, UnsupportedError
from ..description import all_nodes
from ..gradients.contract import JointGraph
from .fragment import Fragment
from .random import feed_seeds
from .update import JOINED, NEW, add_update, moments_of

RATE, STEP, SEED = "lr", "step", "seed"
COUNT = "accumulated.count"
"""The state that counts the batches since the last update (int64, one number)."""
ACCUMULATED = ".accumulated"


State = tuple[int, tuple[int, ...]]
"""Element type and shape of a state tensor."""


@dataclass(frozen=True)
class StepModel:
    """The graph, and its states: name -> (element type, shape)."""

    model: onnx.ModelProto
    states: dict[str, State]


def step_model(
    joint: JointGraph,
    spec: OptimizerSpec,
    counters: Mapping[str, int],
    *,
    unused: Mapping[str, State] | None = None,
    accumulate: int = 1,
    optimize: bool = True,
) -> StepModel:
    """The joint graph with the optimizer's update behind it.

    `counters` are integer buffers that grow by a constant in every step; `unused` are tensors of the checkpoint that the graph does not
    read, handed through so that the state stays complete.
    """
    if accumulate < 1:
        raise CheckpointError(f"must be at least 1, not {accumulate!r}", field="accumulate")
    model = onnx.ModelProto()
    model.CopyFrom(joint.model)
    graph = model.graph
    tensors = {value.name: _type_of(value) for value in graph.input if value.name not in joint.inputs}
    tensors |= {name: (TensorProto.INT64, ()) for name in counters if name not in tensors}
    tensors |= {name: state for name, state in (unused or {}).items() if name not in tensors}
    trained = {name: tensors[name] for name in joint.gradients}
    added = [(f"{name}.{kind}", state) for name, state in trained.items() for kind in moments_of(spec)]
    if accumulate > 1:
        added += [(f"{name}{ACCUMULATED}", state) for name, state in trained.items()]
        added.append((COUNT, (TensorProto.INT64, ())))
    _refuse_clashes([*joint.inputs, joint.loss, *joint.extras], tensors, [name for name, _ in added])
    states = {**tensors, **dict(added)}
    _free_names(graph, {*states, *(f"{name}{NEW}" for name in states), RATE, STEP, SEED})
    fragment = Fragment(_names(graph))
    random = feed_seeds(model, fragment)
    for name in tensors:
        if name in counters:
            fragment("Add", name, fragment.constant(counters[name], np.int64), name=f"{name}{NEW}")
        elif name not in trained:
            fragment("Identity", joint.updates.get(name, name), name=f"{name}{NEW}")
    joined = JOINED if optimize else 0
    if accumulate == 1:
        _update(fragment, spec, trained, joint.gradients, joined)
    else:
        _accumulate(fragment, spec, trained, joint.gradients, accumulate, joined)
    values = {value.name: value for value in (*graph.input, *graph.output)}
    inputs = [values[name] for name in joint.inputs]
    inputs += [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in states.items()]
    inputs += [helper.make_tensor_value_info(RATE, TensorProto.FLOAT, []), helper.make_tensor_value_info(STEP, TensorProto.INT64, [])]
    inputs += [helper.make_tensor_value_info(SEED, TensorProto.INT64, [])] if random else []
    outputs = [values[name] for name in (joint.loss, *joint.extras)]
    outputs += [helper.make_tensor_value_info(f"{name}{NEW}", kind, shape) for name, (kind, shape) in states.items()]
    return StepModel(_assembled(model, fragment, inputs, outputs), states)


def _update(graph: Fragment, spec: OptimizerSpec, trained: Mapping[str, State], gradients: Mapping[str, str], joined: int) -> None:
    shapes = {name: shape for name, (_, shape) in trained.items()}
    types = {name: kind for name, (kind, _) in trained.items()}
    add_update(graph, spec, shapes, gradients, joined=joined, types=types)


def _accumulate(
    graph: Fragment,
    spec: OptimizerSpec,
    trained: Mapping[str, State],
    gradients: Mapping[str, str],
    batches: int,
    joined: int,
) -> None:
    """Add the gradients up, and update with their sum at every `batches`-th batch."""
    one = graph.constant(1, np.int64)
    count = graph("Add", COUNT, one)
    last = graph("GreaterOrEqual", count, graph.constant(batches, np.int64))
    graph("Where", last, graph.constant(0, np.int64), count, name=f"{COUNT}{NEW}")
    kept = {kind: graph("Cast", graph("Not", last), to=kind) for kind, _ in trained.values()}
    sums = {name: graph("Add", f"{name}{ACCUMULATED}", value) for name, value in gradients.items()}
    for name, value in sums.items():
        graph("Mul", value, kept[trained[name][0]], name=f"{name}{ACCUMULATED}{NEW}")
    states = {state: kind for name, kind in trained.items() for state in (name, *(f"{name}.{moment}" for moment in moments_of(spec)))}
    inner = graph.inside()
    _update(inner, spec, trained, sums, joined)
    others = graph.inside()
    for state in states:
        others("Identity", state, name=f"{state}{NEW}")
    graph.branch(last, inner, others, {f"{state}{NEW}": kind for state, kind in states.items()})


def _type_of(value: onnx.ValueInfoProto) -> tuple[int, tuple[int, ...]]:
    kind = value.type.tensor_type
    if any(not size.HasField("dim_value") for size in kind.shape.dim):
        raise UnsupportedError("a parameter or buffer without a fixed shape", field=value.name)
    return kind.elem_type, tuple(size.dim_value for size in kind.shape.dim)


def _refuse_clashes(visible: Sequence[str], tensors: Iterable[str], added: Iterable[str]) -> None:
    """Raise if two tensors of the contract would have one name. `added` are the states that the module does not have."""
    states = [*tensors, *added]
    counts = Counter([*visible, *states, *(f"{name}{NEW}" for name in states), RATE, STEP, SEED])
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise CheckpointError(
            f"two tensors of the step model would be called {twice[0]!r}",
            field=twice[0],
            remedy="Rename that input or parameter in the module.",
        )


def _names(graph: onnx.GraphProto) -> set[str]:
    found = {tensor.name for tensor in graph.initializer} | {value.name for value in (*graph.input, *graph.output)}
    return found | {name for node in all_nodes(graph) for name in (*node.input, *node.output)}


def _free_names(graph: onnx.GraphProto, wanted: Iterable[str]) -> None:
    """Rename values inside the graph that have a name of the contract."""
    fixed = {value.name for value in (*graph.input, *graph.output)}
    inner = ({name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}) - fixed
    new = {name: f"inner/{name}" for name in inner.intersection(wanted)}
    if not new:
        return
    for node in all_nodes(graph):  # bodies of branches and loops read values of the graph around them
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
    for item in (*graph.initializer, *graph.value_info):
        item.name = new.get(item.name, item.name)


def _assembled(
    model: onnx.ModelProto, fragment: Fragment, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    inputs, outputs = ([onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values] for values in (inputs, outputs))
    graph = model.graph
    del graph.input[:], graph.output[:]
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    graph.node.extend(fragment.nodes)
    graph.initializer.extend(fragment.constants)
    read = {name for node in all_nodes(graph) for name in node.input}
    used = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]  # ONNX Runtime warns about those that nothing reads
    graph.initializer.extend(used)
    graph.name = "step"
    model.producer_name = "torch_ort_ckpt"
    return model

"""Stage 5: a traced program becomes an ONNX graph of standard operators, whose parameters and buffers are inputs without values."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec

from ...errors import MissingDependencyError, UnsupportedError
from ..description import DETACHED, ONNX_ERRORS, PADDING, all_nodes
from ..passes.identity_transpose import remove_identity_transposes
from ..passes.pipelines import FASTER, apply
from ..passes.sequence_splits import split_without_sequences
from .capture import TRACING_ERRORS, quiet
from .decompositions.onnx_operators import translations
from .joint import Role
from .private_export import flat_tuple
from .where import first_line, line_of_operator
from .with_loss import MODULE

OPSET = 18
"""The lowest that PyTorch's exporter writes, and one that every supported release of ONNX Runtime reads."""

_IR_OF_OPSET = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10}


_REPORT = "Report it with the module, and try the newest torch and onnxscript."


@dataclass(frozen=True)
class Names:
    """The names that the ONNX graph gets: of its inputs and outputs by position, and of symbolic sizes."""

    inputs: list[Role]
    outputs: list[str]
    sizes: Mapping[str, str]


def translate(
    program: ExportedProgram, names: Names, opset: int | None, before: ExportedProgram, *, optimize: bool = False
) -> onnx.ModelProto:
    """The program as ONNX. `before` is the graph that has the lines of the user's code, for errors. `optimize`: with fewer nodes."""
    try:
        import onnxscript  # noqa: F401  # PyTorch's exporter needs it
    except ImportError as error:
        raise MissingDependencyError(f"PyTorch's ONNX exporter needs onnxscript ({error})", remedy="pip install onnxscript.") from error
    if opset is not None and opset < OPSET:
        raise UnsupportedError(f"opset {opset}", field="opset", remedy=f'Use {OPSET} or later; builder="ort" goes down to 15.')
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    padding = [
        _padding(node) for node in program.graph.nodes if node.op == "call_function" and str(node.target).startswith("aten.embedding.")
    ]
    with _plain_outputs(program), quiet(), contextlib.redirect_stdout(io.StringIO()):
        try:
            result = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                opset_version=opset or OPSET,
                verbose=False,
                custom_translation_table=translations(),
            )
            if result is None:
                raise UnsupportedError("PyTorch's ONNX exporter returned nothing", remedy=_REPORT)
            model = _without_weights(
                result, {role.name for role in names.inputs if role.kind in ("parameter", "buffer") and not role.positional}
            )
        except TRACING_ERRORS as error:
            raise _untranslated(error, operators, before) from error
        except ONNX_ERRORS as error:
            raise UnsupportedError(f"PyTorch's ONNX exporter wrote an invalid graph ({first_line(error)})", remedy=_REPORT) from error
    _rename(model, names)
    _widen_indices(model)
    _mark(model, padding)
    split_without_sequences(model)
    remove_identity_transposes(model)  # ONNX Runtime takes any Transpose before a Gemm for one that swaps rows and columns
    if optimize:
        apply(model, FASTER)  # while the graph still declares the shapes of its values
    model.ir_version = _IR_OF_OPSET.get(opset or OPSET, 10)
    _clean(model, names.sizes)
    return model


@contextlib.contextmanager
def _plain_outputs(program: ExportedProgram) -> Iterator[None]:
    """While it is translated, all outputs of the program are the user's: of a joint graph's own kinds the exporter makes an empty graph,
    without an error."""
    signature, root = program.graph_signature, program.module_call_graph[0].signature
    assert root is not None
    specs, tree, outputs = list(signature.output_specs), root.out_spec, root.outputs
    signature.output_specs[:] = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in specs]
    root.out_spec = flat_tuple(len(specs))
    root.outputs = [spec.arg for spec in signature.output_specs]
    try:
        yield
    finally:
        signature.output_specs[:] = specs
        root.out_spec, root.outputs = tree, outputs


def _without_weights(result: Any, names: set[str]) -> onnx.ModelProto:
    """The model as a protobuf, with parameters and buffers as inputs: their values are in the checkpoint, and never copied here."""
    from onnxscript import ir

    graph = result.model.graph
    for name in [name for name in graph.initializers if name in names]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    model: onnx.ModelProto = ir.serde.serialize_model(result.model)
    return model


def _untranslated(error: BaseException, operators: Sequence[str], before: ExportedProgram) -> UnsupportedError:
    """Which operator has no translation, and where it comes from."""
    text: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        text.append(str(seen))
        seen = seen.__cause__
    found = re.search(r"OpOverload\(op='(?P<op>[\w.]+)', overload='(?P<overload>\w+)'\)", "\n".join(text))
    operator = f"{found['op']}.{found['overload']}" if found else None
    if operator is None:
        operator = next((name for name in operators if name in "\n".join(text)), None)
    line = line_of_operator(operator, list(before.graph.nodes)) if operator else None
    what = f"the operator {operator} has no translation to ONNX" if operator else f"PyTorch's ONNX exporter fails ({first_line(error)})"
    return UnsupportedError(
        what,
        field=line,
        remedy="Replace it in the module by other operators, or register a decomposition of it "
        f"(torch_ort_ckpt.register_decomposition(torch.ops.{operator or 'aten...'})).",
    )


def _rename(model: onnx.ModelProto, names: Names) -> None:
    """The user's names for inputs, outputs, parameters and buffers; a value in between that has one of them gets another."""
    graph = model.graph
    states = {role.name: public_name(role.name) for role in names.inputs if role.kind in ("parameter", "buffer") and not role.positional}
    given = [public_name(role.name) if role.kind != "input" else role.name for role in names.inputs if role.positional]
    new = dict(states)
    for value, name in zip([value for value in graph.input if value.name not in states], given, strict=True):
        new[value.name] = name
    if both := sorted(set(given) & set(states.values())):
        raise UnsupportedError(
            f"{both[0]!r} is the name of an input and of a parameter", field=both[0], remedy="Rename the argument of the forward."
        )
    taken = {*given, *names.outputs, *states.values()}
    for name in [*(name for node in all_nodes(graph) for name in node.output), *(tensor.name for tensor in graph.initializer)]:
        if name in taken:
            new[name] = f"{name}.value"
    for node in all_nodes(graph):
        for field in (node.input, node.output):
            for place, name in enumerate(field):
                if name in new:
                    field[place] = new[name]
    for holder in (*graph.input, *graph.initializer, *graph.value_info):
        holder.name = new.get(holder.name, holder.name)
    for value, name in zip(graph.output, names.outputs, strict=True):
        # One value can be two outputs, or an input, or a constant: each output gets a node of its own.
        source = new.get(value.name, value.name)
        graph.node.append(helper.make_node("Identity", [source], [name]))
        graph.value_info.append(value)
        graph.value_info[-1].name = source
        value.name = name


def keep_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Let these be the graph's outputs, in this order (in place)."""
    declared = {value.name: value for value in model.graph.output}
    _replace(model.graph.output, [declared[name] for name in names])


def public_name(target: str) -> str:
    """The user's name of a parameter; one of the loss is called `loss.<name>`."""
    return target.removeprefix(MODULE)


def _widen_indices(model: onnx.ModelProto) -> None:
    """ScatterND takes int64 indices only; PyTorch's exporter passes int32 ones on."""
    nodes = []
    for node in model.graph.node:
        if node.op_type == "ScatterND":
            wide = f"{node.output[0]}.indices"
            nodes.append(helper.make_node("Cast", [node.input[1]], [wide], to=TensorProto.INT64))
            node.input[1] = wide
        nodes.append(node)
    _replace(model.graph.node, nodes)


def _padding(node: Any) -> tuple[str, int]:
    """An embedding's name and the row that gets no gradient, or -1."""
    row = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
    return str(node.name), int(row)


def _mark(model: onnx.ModelProto, padding: Sequence[tuple[str, int]]) -> None:
    """Notes for those who differentiate the forward part again: rows of embeddings without gradient, and values without gradient."""
    rows = dict(padding)
    for node in model.graph.node:
        first = node.output[0] if node.output else ""
        if node.op_type == "Gather" and rows.get(first, -1) >= 0:
            node.doc_string = f"{PADDING}{rows[first]}"
        elif node.op_type == "Identity" and re.fullmatch(r"detach(_\d+)?", first):
            node.doc_string = DETACHED
        else:
            node.doc_string = ""


def _clean(model: onnx.ModelProto, sizes: Mapping[str, str]) -> None:
    """Without stack traces and absolute paths of this machine; symbolic sizes under the user's names."""
    model.producer_name, model.producer_version, model.doc_string = "torch_ort_ckpt", "", ""
    graph = model.graph
    graph.name, graph.doc_string = "joint", ""
    for holder in (model, graph, *graph.input, *graph.output, *graph.initializer, *all_nodes(graph)):
        if "metadata_props" in holder.DESCRIPTOR.fields_by_name:
            del holder.metadata_props[:]
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = _named_size(size.dim_param, sizes)
    used = {node.domain for node in all_nodes(graph)}
    _replace(model.opset_import, [item for item in model.opset_import if item.domain in used | {""}])


def _named_size(text: str, sizes: Mapping[str, str]) -> str:
    """`2*s0` with the names that were asked for."""
    return sizes.get(text) or re.sub(r"\bs\d+\b|\bu\d+\b", lambda found: sizes.get(found[0], found[0]), text)


def _replace(field: Any, values: Sequence[Any]) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)

"""`to_torch_module`: artifacts as a plain `nn.Module` that needs nothing but torch, and the Python source it is made from."""

from __future__ import annotations

import ast
import keyword
import linecache
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from ...checkpoint.state import Value, split_half_suffix
from ...errors import CheckpointError, MissingFileError
from ...storage.files import atomic_write
from ...storage.paths import PathLike, as_path, refuse_existing
from ..artifacts import Artifacts
from ..translation import Translation, translate
from ..translation.constants import plain_numbers
from . import text as source_text
from .functions import Library

_LITERAL = 64
"""Constants with more elements are buffers of the module instead of text in its source."""
_AMBIGUOUS = frozenset({"l", "O", "I"})
"""Names that linters refuse because they look like digits."""
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def to_torch_module(
    artifacts: Artifacts | PathLike, *, outputs: Sequence[str] | None = None, source: PathLike | None = None, overwrite: bool = False
) -> nn.Module:
    """A module with the graph's parameters under their own names. In training mode it computes the training graph, else the eval graph.

    `outputs` names other values of the graph than the loss: `["logits"]` gives a module that takes no labels. `source` is a file to
    write the module's Python source to; it defines the class `Model` and imports only torch. An existing file is replaced only with
    `overwrite`.
    """
    if source is not None:
        refuse_existing(as_path(source), overwrite, "source")
    found = artifacts if isinstance(artifacts, Artifacts) else Artifacts.load(artifacts)
    found.state.require_values()
    plan = _Plan(found, outputs)
    text = plan.text()
    if source is not None:
        with atomic_write(source) as file:
            file.write(text.encode())
    name = f"<torch module of {found.folder}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "torch_module"}
    exec(compile(text, name, "exec"), namespace)  # our own text, made above
    module: nn.Module = namespace["Model"]()
    values = {**{key: torch.as_tensor(value) for key, value in plan.values.items()}, **plan.constants}
    module.load_state_dict(values, strict=True)
    return module


class _Plan:
    """The two translated graphs, the parameters they use, and the text made of them."""

    def __init__(self, artifacts: Artifacts, outputs: Sequence[str] | None) -> None:
        self.artifacts = artifacts
        names = [*artifacts.parameters, *artifacts.aliases]
        self.graphs: dict[str, Translation] = {}
        for mode, model, specs in (("training", artifacts.training, artifacts.outputs), ("eval", artifacts.eval, artifacts.eval_outputs)):
            if model is not None and (outputs is None or _has(model, outputs)):
                wanted = list(outputs) if outputs is not None else [spec.name for spec in specs]
                self.graphs[mode] = translate(model, parameters=names, outputs=wanted)
        if not self.graphs:
            if outputs is not None:
                raise CheckpointError(
                    f"no graph has all of {', '.join(outputs)}",
                    path=artifacts.folder,
                    field="outputs",
                    remedy="Names of values are in the .onnx file: onnx.load(path).graph.",
                )
            raise MissingFileError("neither training_model.onnx nor eval_model.onnx", path=artifacts.folder)
        used = {artifacts.aliases.get(name, name) for graph in self.graphs.values() for name in graph.parameters}
        state: dict[str, Value] = dict(artifacts.state.parameters)
        self.trainable = set(artifacts.state.trainable)
        self.values = {name: state[name] for name in artifacts.in_order(artifacts.parameters) if name in used}
        self.constants: dict[str, torch.Tensor] = {}
        prefixes = {".".join(parts[:end]) for name in self.values for parts in [name.split(".")] for end in range(1, len(parts))}
        self._both = prefixes & set(self.values)

    def text(self) -> str:
        library = Library()
        settings = [
            f"add(self, {source_text.string(name)}, {_empty(value)}, {name in self.trainable})" for name, value in self.values.items()
        ]
        methods: list[str] = []
        for mode, graph in self.graphs.items():
            self._add_method(f"{mode}_graph", graph.module, library, methods, settings, self._types(graph, library))
        folder = re.sub(r"[^\w .,()+-]+", "_", self.artifacts.folder.name)[:60]
        head = [f'"""Made from the training artifacts in {folder}; needs only torch."""', library.text()]
        lines = [source_text.line("", _parsed(setting), 8) for setting in settings]
        init = "\n        ".join(["    def __init__(self) -> None:", "super().__init__()", *lines])
        model = "\n\n".join([f"class Model(nn.Module):\n{init}", self._forward(library), *methods])
        return "\n\n".join(head) + f"\n\n\n{_ADD}\n\n\n{model}\n"

    def _types(self, graph: Translation, library: Library) -> list[str]:
        """The annotations of a graph's arguments."""
        sequences = {spec.name for spec in self.artifacts.inputs if spec.dtype is None}
        if sequences.intersection(graph.inputs):
            library.use_member("typing", "Any")
        return ["Any" if name in sequences else "Tensor" for name in (*graph.inputs, *graph.parameters)]

    def _forward(self, library: Library) -> str:
        """Picks the graph."""
        kinds: dict[str, str] = {}
        for graph in self.graphs.values():
            kinds.update(zip(_arguments(graph)[: len(graph.inputs)], self._types(graph, library), strict=False))
        results = {"Tensor" if len(graph.outputs) == 1 else "tuple[Tensor, ...]" for graph in self.graphs.values()}
        parameters = ["self", *(f"{name}: {kind}" for name, kind in kinds.items())]
        lines = ["    " + source_text.signature("forward", parameters, " | ".join(sorted(results)), 4)]
        for mode, graph in self.graphs.items():
            indent = 8
            if mode == "training" and len(self.graphs) == 2:
                lines.append("        if self.training:")
                indent = 12
            arguments = [*_arguments(graph)[: len(graph.inputs)], *(self._access(name) for name in graph.parameters)]
            lines.append(" " * indent + source_text.line("return ", _parsed(f"self.{mode}_graph({', '.join(arguments)})"), indent))
        return "\n".join(lines)

    def _access(self, name: str) -> str:
        """How a method accesses a parameter, in the type that the graph expects."""
        if name in self.artifacts.aliases:
            return f"{self._access(self.artifacts.aliases[name])}.to({split_half_suffix(name)[1]})"
        parts = name.split(".")
        plain = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
        prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if _ATTRIBUTES.intersection(parts) or not all(parts) or prefixes & self._both:
            path = "".join(f"._modules[{source_text.string(part)}]" for part in parts[:-1])
            return f"self{path}.{'_parameters' if name in self.trainable else '_buffers'}[{source_text.string(parts[-1])}]"
        if plain:
            return f"self.{name}"
        return f"self.get_{'parameter' if name in self.trainable else 'buffer'}({source_text.string(name)})"

    def _add_method(
        self, name: str, module: fx.GraphModule, library: Library, methods: list[str], settings: list[str], kinds: list[str] | None = None
    ) -> None:
        """The graph as a method. `kinds` are the types of its arguments; None for the branch of an If or the body of a loop, which get
        anything and give a tuple."""
        code = module.graph.python_code("self")
        definition = next(item for item in ast.parse(code.src).body if isinstance(item, ast.FunctionDef))
        members = {
            key: f"{name}_{key}" for key, _ in (*module.named_buffers(recurse=False, remove_duplicate=False), *module.named_children())
        }
        read = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
        names = {key: _global(library, value, key) for key, value in code.globals.items() if key in read and key != "torch"}
        parameters = [argument.arg for argument in definition.args.args][1:]
        own = {*parameters, *(node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))}
        renamed = _renamed(own, library.names | _AMBIGUOUS | {"torch", "nn"})
        rewriter = _Rewriter({**{key: _parsed(text) for key, text in names.items()}, **renamed}, members)
        body = _tidied([rewriter.visit(item) for item in definition.body], single=kinds is not None)
        if kinds is None:
            library.use_member("typing", "Any")
        for key, value in module.named_buffers(recurse=False, remove_duplicate=False):
            self._constant(members[key], value, settings)
        for key, child in module.named_children():
            if isinstance(child, fx.GraphModule):
                self._add_method(members[key], child, library, methods, settings)
        heads = zip([renamed[key].id if key in renamed else key for key in parameters], kinds or ["Any"] * len(parameters), strict=True)
        results = definition.body[-1]
        count = len(results.value.elts) if isinstance(results, ast.Return) and isinstance(results.value, ast.Tuple) else 1
        result = "Any" if kinds is None else "Tensor" if count == 1 else "tuple[Tensor, ...]"
        head = source_text.signature(name, ["self", *(f"{key}: {kind}" for key, kind in heads)], result, 4)
        methods.append("\n".join(["    " + head, *(f"        {source_text.statement(item, 8)}" for item in body)]))

    def _constant(self, key: str, value: torch.Tensor, settings: list[str]) -> None:
        literal = value.numel() <= _LITERAL and not value.is_complex() and not (value.is_floating_point() and value.itemsize == 1)
        name = source_text.string(key)
        if literal and value.numel():
            settings.append(
                f"self.register_buffer({name}, torch.tensor({_literal(plain_numbers(value))}, dtype={value.dtype}), persistent=False)"
            )
        elif literal:
            settings.append(f"self.register_buffer({name}, {_empty(value)}, persistent=False)")
        else:
            settings.append(f"self.register_buffer({name}, {_empty(value)})")
            self.constants[key] = value


_ADD = """
def add(module: nn.Module, name: str, value: Tensor, trainable: bool) -> None:
    *path, key = name.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = nn.Module()
        module = module._modules[part]
    if trainable:
        module._parameters[key] = nn.Parameter(value)
    else:
        module._buffers[key] = value
""".strip()

_ATTRIBUTES = frozenset(dir(nn.Module())) | {"training_graph", "eval_graph"}
"""Parts of a parameter's name that are something else as attributes of a module."""


class _Rewriter(ast.NodeTransformer):
    """Names of functions and values as the text has them, attributes of the graph's module as those of the class."""

    def __init__(self, names: Mapping[str, ast.expr], members: Mapping[str, str]) -> None:
        self.names, self.members = names, members

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.names.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.Attribute(node.value, self.members.get(node.attr, node.attr), node.ctx)
        return ast.Attribute(self.visit(node.value), node.attr, node.ctx)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """The number on the right; what is compared with True or False is a tensor, where linters would have `is`."""
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        kind = type(node.ops[0])
        if isinstance(left, ast.Constant) and not isinstance(right, ast.Constant):
            left, right, kind = right, left, _FLIPPED.get(kind, kind)
        if isinstance(right, ast.Constant) and isinstance(right.value, bool) and kind is ast.Eq:
            return ast.Call(_parsed("torch.eq"), [left, right], [])
        return ast.Compare(left, [kind()], [right])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Joined tuples are written as one."""
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Add) and (isinstance(left, ast.Tuple) or isinstance(right, ast.Tuple)):
            parts = [part.elts if isinstance(part, ast.Tuple) else [ast.Starred(part, ast.Load())] for part in (left, right)]
            return ast.Tuple([*parts[0], *parts[1]], ast.Load())
        return ast.BinOp(left, node.op, right)


def _tidied(body: list[ast.stmt], *, single: bool) -> list[ast.stmt]:
    """Without the lines by which fx frees every value (Python does at the end), values that nobody reads, and, if `single`, the tuple
    around a single result."""
    kept = [
        item for item in body if not (isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and item.value.value is None)
    ]
    end = kept[-1]
    if single and isinstance(end, ast.Return) and isinstance(end.value, ast.Tuple) and len(end.value.elts) == 1:
        kept[-1] = end = ast.Return(end.value.elts[0])
    read = [node.id for item in kept for node in ast.walk(item) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    found: list[ast.stmt] = []
    for item in kept:
        target = item.targets[0] if isinstance(item, ast.Assign) else None
        if isinstance(item, ast.Assign) and isinstance(target, ast.Name) and target.id not in read:
            if isinstance(item.value, ast.Call):
                found.append(ast.Expr(item.value))
            continue
        found.append(item)
    last = found[-2] if len(found) > 1 else None
    if (
        isinstance(end, ast.Return)
        and isinstance(end.value, ast.Name)
        and isinstance(last, ast.Assign)
        and isinstance(last.targets[0], ast.Name)
    ):
        name = end.value.id
        if last.targets[0].id == name:
            found[-2:] = [ast.Return(last.value)]
    return found


def _renamed(names: set[str], taken: set[str] | frozenset[str]) -> dict[str, ast.Name]:
    """Values with the name of a function, or one that linters refuse."""
    found: dict[str, ast.Name] = {}
    for name in sorted(names & taken):
        other = name
        while other in names or other in taken:
            other += "_"
        names.add(other)
        found[name] = ast.Name(other, ast.Load())
    return found


def _global(library: Library, value: Any, name: str) -> str:
    return f'float("{value}")' if name in ("inf", "nan") else library.expression(value, name)


def _arguments(graph: Translation) -> list[str]:
    names = [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]
    return [f"{name}_" if name in _AMBIGUOUS or name == "torch" else name for name in names]


def _empty(value: Any) -> str:
    value = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
    return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"


def _literal(value: Any) -> str:
    return re.sub(r"(?<![\w.])(inf|nan)\b", r'float("\1")', repr(value))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _has(model: Any, outputs: Sequence[str]) -> bool:
    names = {name for node in model.graph.node for name in node.output}
    return set(outputs) <= names

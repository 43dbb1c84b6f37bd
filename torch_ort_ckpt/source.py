"""`to_torch_module`: artifacts as a plain `nn.Module` that needs nothing but torch, and the Python source it is made from."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import linecache
import re
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from .artifacts import Artifacts
from .engines.torch import Translation, translate
from .errors import CheckpointError, MissingFileError
from .paths import refuse_url
from .state import Value
from .storage import PathLike, atomic_write

_PACKAGE = __name__.partition(".")[0]
_LITERAL = 64
"""Constants with more elements are buffers of the module instead of text in its source."""


def to_torch_module(artifacts: Artifacts | PathLike, *, outputs: Sequence[str] | None = None, source: PathLike | None = None) -> nn.Module:
    """A module with the graph's parameters under their own names. In training mode it computes the training graph, else the eval graph.

    `outputs` names other values of the graph than the loss: `["logits"]` gives a module that takes no labels. `source` is a file to
    write the module's Python source to; it defines the class `Model` and imports only torch.
    """
    refuse_url(source)
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
        self.folder = artifacts.folder.name
        names = list(artifacts.parameters)
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
        used = {name for graph in self.graphs.values() for name in graph.parameters}
        state: dict[str, Value] = dict(artifacts.state.parameters)
        self.trainable = set(artifacts.state.trainable)
        self.values = {name: state[name] for name in artifacts.in_order(names) if name in used}
        self.constants: dict[str, torch.Tensor] = {}

    def text(self) -> str:
        library = _Library()
        methods: list[str] = []
        settings: list[str] = []
        for mode, graph in self.graphs.items():
            self._add_method(f"{mode}_graph", graph.module, library, methods, settings)
        inputs = list(dict.fromkeys(name for graph in self.graphs.values() for name in _arguments(graph)[: len(graph.inputs)]))
        body = [
            "class Model(nn.Module):",
            "    def __init__(self) -> None:",
            "        super().__init__()",
            *(f"        add(self, {name!r}, {_empty(value)}, {name in self.trainable})" for name, value in self.values.items()),
            *(f"        {line}" for line in settings),
            "",
            f"    def forward(self, {', '.join(inputs)}):",
            *self._dispatch(),
            "",
            *("\n".join(textwrap.indent(method, "    ").splitlines()) + "\n" for method in methods),
        ]
        return (
            "\n".join(
                [f'"""Made from the training artifacts in {self.folder}; needs only torch."""', "", library.text(), _ADD, *body]
            ).rstrip()
            + "\n"
        )

    def _dispatch(self) -> list[str]:
        calls = {mode: f"self.{mode}_graph({', '.join(self._call_arguments(graph))})" for mode, graph in self.graphs.items()}
        pick = [f"        outputs = {call}" for call in calls.values()]
        if len(calls) == 2:
            pick = [
                "        if self.training:",
                f"            outputs = {calls['training']}",
                "        else:",
                f"            outputs = {calls['eval']}",
            ]
        return [*pick, "        return outputs[0] if len(outputs) == 1 else outputs"]

    def _call_arguments(self, graph: Translation) -> list[str]:
        return [*_arguments(graph)[: len(graph.inputs)], *(_access(name, name in self.trainable) for name in graph.parameters)]

    def _add_method(self, name: str, module: fx.GraphModule, library: _Library, methods: list[str], settings: list[str]) -> None:
        code = module.graph.python_code("self")
        text = code.src.strip().replace("def forward(", f"def {name}(", 1)
        text = re.sub(r";\s+(\w+ = )+None *$", "", text, flags=re.MULTILINE)  # fx frees every value; Python does at the end
        names = {key: library.name(value, key) for key, value in code.globals.items() if re.search(rf"\b{key}\b", text)}
        values = {node.name for node in module.graph.nodes}
        for taken in values.intersection(names.values()):  # a value with the name of a function
            other = taken
            while other in values:
                other += "_"
            text = re.sub(rf"(?<![\w.]){taken}\b", other, text)
            values.add(other)
        for key, written in names.items():
            text = re.sub(rf"\b{re.escape(key)}\b", written, text)
        for key, value in module.named_buffers(recurse=False):
            text = re.sub(rf"\bself\.{key}\b", f"self.{name}_{key}", text)
            self._constant(f"{name}_{key}", value, settings)
        for key, child in module.named_children():
            text = re.sub(rf"\bself\.{key}\b", f"self.{name}_{key}", text)
            if isinstance(child, fx.GraphModule):  # the branch of an If or the body of a loop
                self._add_method(f"{name}_{key}", child, library, methods, settings)
        methods.append(text)

    def _constant(self, key: str, value: torch.Tensor, settings: list[str]) -> None:
        if value.numel() <= _LITERAL and value.dtype not in (torch.bfloat16, torch.float16):
            made = f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype})"
            settings.append(f"self.register_buffer({key!r}, {made}.reshape({tuple(value.shape)}), persistent=False)")
        else:
            settings.append(f"self.register_buffer({key!r}, {_empty(value)})")
            self.constants[key] = value


@dataclass
class _Library:
    """The functions a text needs: torch's by name, ours copied with everything they use in turn."""

    functions: dict[Callable[..., Any], str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    imports: set[str] = field(default_factory=lambda: {"import torch", "from torch import nn"})

    def text(self) -> str:
        constants = [f"{name} = {value}" for name, value in self.constants.items()]
        return "\n".join(
            ["from __future__ import annotations", "", *sorted(self.imports), "", "", "\n\n\n".join(self.texts), *constants, ""]
        )

    def name(self, value: Any, fallback: str) -> str:
        """How to write a global in the text; what it needs is added to the library."""
        if isinstance(value, types.ModuleType):
            return self._module(value, fallback)
        if inspect.isfunction(value) and value.__module__.startswith(_PACKAGE):
            return self._copy(value)
        if fallback in ("inf", "nan"):
            return f'float("{fallback}")'
        if value is torch.device:
            return "torch.device"
        if isinstance(value, types.MethodDescriptorType):
            return f"torch.Tensor.{value.__name__}"
        module = getattr(value, "__module__", None) or ""
        if module in ("_operator", "operator"):
            self.imports.add("import operator")
            return f"operator.{value.__name__}"
        if module.startswith("torch") and hasattr(value, "__name__"):
            return f"{module if module.count('.') else 'torch'}.{value.__name__}".replace("torch._C.", "torch.")
        return fallback

    def _module(self, value: types.ModuleType, name: str) -> str:
        plain = value.__name__.partition(".")[0] == name
        self.imports.add(f"import {value.__name__}" if plain or value.__name__ == name else f"import {value.__name__} as {name}")
        return name

    def _copy(self, function: Callable[..., Any]) -> str:
        if function in self.functions:
            return self.functions[function]
        taken = set(self.functions.values())
        name = function.__name__
        if name in taken:
            name = f"{function.__module__.rpartition('_')[2]}_{name.lstrip('_')}"
        self.functions[function] = name
        text = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef)
        text = "\n".join(text.splitlines()[definition.lineno - 1 :])
        text = re.sub(rf"\bdef {re.escape(function.__name__)}\(", f"def {name}(", text, count=1)
        for used in sorted(_names(definition)):
            if used in function.__globals__ and not hasattr(builtins, used):
                text = re.sub(rf"(?<![\w.\"]){re.escape(used)}(?=\W)(?!=[^=])", self._global(used, function.__globals__[used]), text)
        self.texts.append(text)
        return name

    def _global(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            entries = ", ".join(f"{key!r}: {self.name(item, getattr(item, '__name__', ''))}" for key, item in value.items())
            self.constants[name] = f"{{{entries}}}"
            return name
        if isinstance(value, (int, float, str, tuple)):
            self.constants[name] = repr(value)
            return name
        if value is torch.Tensor:
            self.imports.add("from torch import Tensor")
            return name
        return self.name(value, name)


_ADD = """
def add(module: nn.Module, name: str, value: torch.Tensor, trainable: bool) -> None:
    *path, key = name.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = nn.Module()
        module = module._modules[part]
    if trainable:
        module._parameters[key] = nn.Parameter(value)
    else:
        module._buffers[key] = value

"""


def _arguments(graph: Translation) -> list[str]:
    return [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]


def _access(name: str, trainable: bool) -> str:
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        return f"self.{name}"
    return f"self.get_{'parameter' if trainable else 'buffer'}({name!r})"


def _names(definition: ast.FunctionDef) -> set[str]:
    """Names that the body reads; annotations need no definition."""
    defaults = [*definition.args.defaults, *(value for value in definition.args.kw_defaults if value is not None)]
    found = {node.id for part in (*definition.body, *defaults) for node in ast.walk(part) if isinstance(node, ast.Name)}
    for part in ast.walk(definition):
        if isinstance(part, ast.AnnAssign):
            found -= {node.id for node in ast.walk(part.annotation) if isinstance(node, ast.Name)} - {"torch"}
    return found


def _empty(value: Any) -> str:
    value = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
    return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"


def _literal(value: Any) -> str:
    return re.sub(r"\b(inf|nan)\b", r'float("\1")', repr(value))


def _has(model: Any, outputs: Sequence[str]) -> bool:
    names = {name for node in model.graph.node for name in node.output}
    return set(outputs) <= names

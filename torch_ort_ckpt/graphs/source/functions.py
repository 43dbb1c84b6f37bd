"""The functions that a translated graph calls, as text that needs only torch: copied, with everything they use in turn."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import dis
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UnsupportedError
from ..translation.registry import Int, Ints, Operand, Scalar
from . import text as source_text

_PACKAGE = __name__.partition(".")[0]
_ALIASES: dict[int, tuple[str, str]] = {
    id(Ints): ("Ints", "Sequence[int]"),
    id(Int): ("Int", "int"),
    id(Scalar): ("Scalar", "Any"),
    id(Operand): ("Operand", "Any"),
}
"""The annotations of our operators, and what they are in the text."""

RESERVED = frozenset({"Model", "Tensor", "add", "nn", "torch", "self"} | set(dir(builtins)))
"""Names that no function of the text may take."""


@dataclass
class Library:
    """Collects functions; `text` must precede the code that calls them."""

    _names: dict[Callable[..., Any], str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=lambda: set(RESERVED))
    _texts: list[str] = field(default_factory=list)
    _aliases: dict[str, str] = field(default_factory=dict)
    _constants: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, str] = field(default_factory=dict)
    """Constants that refer to functions and must come after them."""
    _known: dict[tuple[str, str], str] = field(default_factory=dict)
    _modules: dict[str, str] = field(default_factory=dict)
    _members: dict[str, set[str]] = field(default_factory=dict)

    def text(self) -> str:
        """Imports, then constants, functions and tables, with blank lines as in PEP 8."""
        self.use_member("torch", "Tensor")
        self.use_member("torch", "nn")
        self._modules.setdefault("torch", "torch")
        blocks = ["from __future__ import annotations", *self._imports()]
        values = [f"{name} = {value}" for name, value in (self._aliases | self._constants).items()]
        blocks += ["\n".join(values)] if values else []
        head = "\n\n".join(blocks)
        tables = (
            ["\n".join(source_text.line(f"{name} = ", _parsed(value), 0) for name, value in self._tables.items())] if self._tables else []
        )
        return "\n\n\n".join([head, *self._texts, *tables])

    @property
    def names(self) -> set[str]:
        """Every name the text defines or imports."""
        members = {name for names in self._members.values() for name in names}
        return {*self._names.values(), *self._aliases, *self._constants, *self._tables, *self._modules.values(), *members}

    def expression(self, value: Any, name: str) -> str:
        """How to write a global that a function or graph calls `name`; what it needs is added."""
        if isinstance(value, types.ModuleType):
            return self._module(value, name)
        if id(value) in _ALIASES:
            alias, meaning = _ALIASES[id(value)]
            for module, member in (("collections.abc", "Sequence"), ("typing", "Any")):
                if meaning.startswith(member):
                    self.use_member(module, member)
            self._aliases[alias] = meaning
            return alias
        if value is torch.Tensor:
            return self.use_member("torch", "Tensor")
        if isinstance(value, torch.dtype):
            return str(value)
        for module in ("builtins", "operator", "math", "typing", "collections.abc"):
            if (found := _name_in(module, value, name)) is not None:
                return self._standard(module, found)
        if _is_torch_s(value):
            return _torch_path(value)
        if inspect.isfunction(value):
            return self.copy(value)
        return self._constant(value, name)

    def copy(self, function: Callable[..., Any]) -> str:
        """The name under which the text has this function."""
        if function in self._names:
            return self._names[function]
        text, definition = _source(function)
        name = self._names[function] = self._free(function.__name__, function.__module__)
        globals_ = _globals(function)
        bound = _bound(definition)
        replaced = {definition.name: name} if name != definition.name else {}
        for used in sorted(_used(definition) - bound):
            if used in globals_:
                written = self._global(globals_[used], used, function)
                if written != used:
                    replaced[used] = written
        self._texts.append(_with_names(text, definition, replaced))
        return name

    def use_member(self, module: str, name: str) -> str:
        """`from module import name`."""
        self._members.setdefault(module, set()).add(name)
        self._taken.add(name)
        return name

    def _global(self, value: Any, name: str, user: Callable[..., Any]) -> str:
        if inspect.isfunction(value) and not _is_torch_s(value) and not _is_copied(value, user):
            return self.use_member(value.__module__, value.__name__)
        key = (user.__module__, name)
        if key not in self._known:
            self._known[key] = self.expression(value, name)
        return self._known[key]

    def _constant(self, value: Any, name: str) -> str:
        """A module's constant under a name of its own; what is not plain data can't be written down."""
        own = self._free(name, "")
        if isinstance(value, dict):
            entries = (f"{self._plain(key, own)}: {self.expression(item, str(key))}" for key, item in value.items())
            self._tables[own] = f"{{{', '.join(entries)}}}"
        else:
            self._constants[own] = self._plain(value, own)
        return own

    def _plain(self, value: Any, name: str) -> str:
        if isinstance(value, (tuple, list)):
            items = ", ".join(self._plain(item, name) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan"):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        if isinstance(value, str):
            return source_text.string(value)
        raise UnsupportedError(
            f"an operator uses {name}, a {type(value).__name__}, which can't be written as source",
            field=name,
            remedy="Put it into the function that is registered, or keep it as numbers, strings, tuples or a dict.",
        )

    def _module(self, value: types.ModuleType, name: str) -> str:
        if value is torch:
            return "torch"
        known = next((own for own, path in self._modules_by_name().items() if path == value.__name__), None)
        if known is None:
            known = self._free(name, "")
            self._modules[value.__name__] = known
        return known

    def _modules_by_name(self) -> dict[str, str]:
        return {own: path for path, own in self._modules.items()}

    def _standard(self, module: str, name: str) -> str:
        if module == "builtins":
            return name
        if module in ("typing", "collections.abc"):
            return self.use_member(module, name)
        return f"{self._module(sys.modules[module], module)}.{name}"

    def _free(self, name: str, module: str) -> str:
        """The name, or one with the end of the module's name before it, or with a number."""
        found = name
        if found in self._taken:
            found = f"{module.rpartition('.')[2].rpartition('_')[2]}_{name.lstrip('_')}"
        count = 2
        while found in self._taken or not found.isidentifier():
            found, count = f"{name.strip('_')}_{count}", count + 1
        self._taken.add(found)
        return found

    def _imports(self) -> Iterator[str]:
        """As ruff sorts them: the standard library, then the rest; `import` before `from`."""
        paths = {path.partition(".")[0] for path in (*self._modules, *self._members)}
        for section in (paths & sys.stdlib_module_names, paths - sys.stdlib_module_names):
            plain = [
                f"import {path}" + (f" as {own}" if own != path else "")
                for path, own in sorted(self._modules.items())
                if path.partition(".")[0] in section
            ]
            members = [
                f"from {path} import {', '.join(sorted(names, key=_import_order))}"
                for path, names in sorted(self._members.items())
                if path.partition(".")[0] in section
            ]
            if plain or members:
                yield "\n".join([*plain, *members])


def _import_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)


def _source(function: Callable[..., Any]) -> tuple[str, ast.FunctionDef]:
    """The function's text from `def` on, and its syntax tree."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(text).body[0]
    except (OSError, SyntaxError) as error:
        raise _not_copied(function, f"its source can't be read ({error})") from error
    if not isinstance(definition, ast.FunctionDef):
        raise _not_copied(function, "it is not defined by `def`")
    if function.__code__.co_freevars:
        raise _not_copied(function, f"it uses {function.__code__.co_freevars[0]!r} of the function around it")
    text = "\n".join(text.splitlines()[definition.lineno - 1 :])
    inner = ast.parse(text).body[0]
    assert isinstance(inner, ast.FunctionDef)
    return text, inner


def _not_copied(function: Callable[..., Any], reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the function {function.__name__} of an operator can't be copied into source: {reason}",
        field=function.__name__,
        remedy="Define it at the top of a module. OrtModule(..., engine='torch') runs it as it is.",
    )


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: value for name, value in function.__globals__.items() if not _is_builtin(name, value)}


def _is_builtin(name: str, value: Any) -> bool:
    return getattr(builtins, name, None) is value


def _used(definition: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}


def _bound(definition: ast.FunctionDef) -> set[str]:
    """Names that are local to the function or to one inside it."""
    code = compile(ast.Module([definition], []), "<function>", "exec")
    bound: set[str] = set()
    waiting: list[Any] = [item for item in code.co_consts if isinstance(item, types.CodeType)]
    loaded: set[str] = set()
    while waiting:
        inner = waiting.pop()
        bound.update(inner.co_varnames, inner.co_cellvars)
        loaded.update(item.argval for item in dis.get_instructions(inner) if item.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        waiting += [item for item in inner.co_consts if isinstance(item, types.CodeType)]
    if both := bound & loaded:
        raise UnsupportedError(
            f"{definition.name} uses {min(both)!r} both as its own name and as its module's",
            remedy="Rename one of them.",
            field=definition.name,
        )
    return bound


def _with_names(text: str, definition: ast.FunctionDef, names: dict[str, str]) -> str:
    """The text with these names written differently: only names, never keywords, attributes, strings or comments."""
    places = [(node.lineno, node.col_offset, node.id) for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id in names]
    if definition.name in names:
        places.append((definition.lineno, definition.col_offset + len("def "), definition.name))
    lines = text.splitlines()
    for number, column, name in sorted(places, reverse=True):
        raw = lines[number - 1].encode()
        lines[number - 1] = (raw[:column] + names[name].encode() + raw[column + len(name.encode()) :]).decode()
    return "\n".join(lines)


def _is_copied(function: Callable[..., Any], user: Callable[..., Any]) -> bool:
    """Whether a function that another uses is copied: ours, and those of the same package; others are imported."""
    package = function.__module__.partition(".")[0]
    return package in (_PACKAGE, "__main__", user.__module__.partition(".")[0])


def _is_torch_s(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] == "torch" or isinstance(value, types.MethodDescriptorType)


def _torch_path(value: Any) -> str:
    """A public path of one of torch's functions."""
    name = value.__name__
    places: Iterable[tuple[str, Any]] = (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.Tensor", torch.Tensor),
        ("torch.linalg", torch.linalg),
        ("torch.special", torch.special),
    )
    for path, place in places:
        if getattr(place, name, None) is value:
            return f"{path}.{name}"
    return f"{value.__module__}.{name}"


def _name_in(module: str, value: Any, name: str) -> str | None:
    """The name of this very object in a module of the standard library."""
    place = sys.modules[module]
    for found in (name, getattr(value, "__name__", None)):
        if isinstance(found, str) and getattr(place, found, None) is value and isinstance(value, (type, *_CALLABLE)):
            return found
    return name if module == "typing" and getattr(typing, name, None) is value else None


_CALLABLE = (types.BuiltinFunctionType, types.FunctionType, type(typing.Any), type(collections.abc.Callable))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body

"""Python statements as text, laid out as `ruff format` does it: what fits on a line stays there, else the outermost brackets are opened.

Only the kinds of statements and expressions that translated graphs consist of; anything else comes from `ast.unparse` on one line.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

WIDTH = 140

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.MatMult: "@",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def statement(node: ast.stmt, indent: int) -> str:
    """An assignment to one name, a return or an expression, without the indentation of its first line."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return line(f"{node.targets[0].id} = ", node.value, indent)
    if isinstance(node, ast.Return) and node.value is not None:
        return line("return ", node.value, indent)
    if isinstance(node, ast.Expr):
        return line("", node.value, indent)
    return ast.unparse(node)


def line(prefix: str, value: ast.expr, indent: int) -> str:
    """`prefix` and the expression."""
    text = expression(value)
    if indent + len(prefix) + len(text) <= WIDTH or not isinstance(value, (ast.BinOp, ast.Compare, ast.Attribute)):
        return prefix + _laid_out(value, indent, indent + len(prefix))
    return f"{prefix}(\n{' ' * (indent + 4)}{text}\n{' ' * indent})"


def signature(name: str, parameters: Sequence[str], result: str, indent: int) -> str:
    """The head of a function."""
    return brackets(f"def {name}(", list(parameters), f") -> {result}:", indent, indent)


def brackets(start: str, items: Sequence[str], end: str, indent: int, column: int) -> str:
    """Items between brackets: on one line, on a line of their own, or on a line each."""
    body = ", ".join(items)
    if column + len(start) + len(body) + len(end) <= WIDTH or not items:
        return start + body + end
    inner = " " * (indent + 4)
    if len(inner) + len(body) <= WIDTH and "\n" not in body:
        return f"{start}\n{inner}{body}\n{' ' * indent}{end}"
    return f"{start}\n" + "".join(f"{inner}{item},\n" for item in items) + " " * indent + end


def expression(node: ast.AST) -> str:
    """On one line."""
    parts = _parts(node)
    if parts is not None:
        start, items, end = parts
        body = ", ".join(_item(item) for item in items)
        return start + body + ("," if isinstance(node, ast.Tuple) and len(items) == 1 else "") + end
    if isinstance(node, ast.Constant):
        return string(node.value) if isinstance(node.value, str) else repr(node.value).replace("e+", "e")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return f"{_operand(node.left)} {_OPERATORS[type(node.op)]} {_operand(node.right)}"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return f"{_operand(node.left)} {_OPERATORS[type(node.ops[0])]} {_operand(node.comparators[0])}"
    if isinstance(node, ast.Attribute):
        return f"{_operand(node.value)}.{node.attr}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return f"-{_operand(node.operand)}"
    if isinstance(node, ast.Starred):
        return f"*{_operand(node.value)}"
    return ast.unparse(node)


def string(value: str) -> str:
    """A literal in double quotes, unless it contains them."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text


def _laid_out(node: ast.AST, indent: int, column: int, after: int = 0) -> str:
    """The expression, from `column` on, on a line with this indentation; `after` characters follow it."""
    text = expression(node)
    parts = _parts(node)
    if column + len(text) + after <= WIDTH or parts is None or not parts[1]:
        return text
    start, items, end = parts
    flat = [_item(item) for item in items]
    inner = indent + 4
    if inner + len(", ".join(flat)) <= WIDTH:
        return f"{start}\n{' ' * inner}{', '.join(flat)}\n{' ' * indent}{end}"
    lines = "".join(f"{' ' * inner}{_long_item(item, inner)},\n" for item in items)
    return f"{start}\n{lines}{' ' * indent}{end}"


_Item = tuple[str, ast.AST]
"""What stands before it (`name=`, `key: `, `*`), and the expression."""


def _parts(node: ast.AST) -> tuple[str, list[_Item], str] | None:
    """Of something in brackets: the opening text, the items and the closing text."""
    if isinstance(node, ast.Call):
        keywords = [(f"{item.arg}=" if item.arg else "**", item.value) for item in node.keywords]
        return f"{_operand(node.func)}(", [*(("", item) for item in node.args), *keywords], ")"
    if isinstance(node, ast.Tuple):
        return "(", [("", item) for item in node.elts], ")"
    if isinstance(node, ast.List):
        return "[", [("", item) for item in node.elts], "]"
    if isinstance(node, ast.Dict):
        return "{", [(f"{expression(key)}: " if key else "**", value) for key, value in zip(node.keys, node.values, strict=True)], "}"
    if isinstance(node, ast.Subscript):
        return f"{_operand(node.value)}[", [("", node.slice)], "]"
    return None


def _item(item: _Item) -> str:
    return item[0] + expression(item[1])


def _long_item(item: _Item, indent: int) -> str:
    return item[0] + _laid_out(item[1], indent, indent + len(item[0]), 1)


def _operand(node: ast.AST) -> str:
    text = expression(node)
    return f"({text})" if isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda)) else text

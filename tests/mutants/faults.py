"""The faults that can be put into a source file, each as a change of its text that keeps the line numbers."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
TYPES_AS_TEXT = {"cast", "TypeVar", "NewType", "ParamSpec"}
MESSAGES = re.compile(r"(Error|Warning|[Ww]arn\w*|refuse\w*|refusal|add_argument|add_parser|print)$")


@dataclass(frozen=True)
class Fault:
    file: str  # relative to the repository
    line: int
    statement: int  # the line its statement starts on: coverage does not know every line of a long one
    kind: str
    start: int  # the bytes of the file that are replaced
    end: int
    old: str
    new: str
    identity: str  # the same for the same fault in the same file

    @property
    def package(self) -> str:
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "(top level)"

    def __str__(self) -> str:
        def short(text: str) -> str:
            text = " ".join(text.split())
            return text if len(text) <= 90 else text[:60] + " ... " + text[-25:]

        return f"{self.file}:{self.line}: {self.kind}: `{short(self.old)}` -> `{short(self.new)}`"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def faults_in(source: bytes, file: str) -> list[Fault]:
    """Every fault for `source`. With some of them it is not Python any more (`is_python`): checking all takes a minute."""
    listing = _Listing(source)
    listing.visit(ast.parse(source))
    digest = hashlib.sha256(source).hexdigest()[:12]
    found = {}
    for kind, line, statement, start, end, new in listing.found:
        old = source[start:end].decode()
        new += "\n" * (old.count("\n") - new.count("\n"))  # the lines below keep their numbers
        identity = f"{file}@{digest}:{start}-{end}:{kind}:{hashlib.sha256(new.encode()).hexdigest()[:8]}"
        found[identity] = Fault(file, line, statement, kind, start, end, old, new, identity)
    return list(found.values())


def is_python(source: bytes) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True


class _Listing(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[str, int, int, int, int, str]] = []
        self.statement = 1
        self.in_message = False

    def visit(self, node: ast.AST) -> None:
        before = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        super().visit(node)
        self.statement = before

    # positions

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]  # only asked for nodes that have them
        return self.starts[at[0] - 1] + at[1], self.starts[at[2] - 1] + at[3]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, kind: str, node: ast.AST, new: str, span: tuple[int, int] | None = None) -> None:
        self.found.append((kind, node.lineno, self.statement, *(span or self.span(node)), new))  # type: ignore[attr-defined]

    def add_operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end].decode()
        match = re.search(rf"(?<!\w){old}(?!\w)", gap)
        if match and "#" not in gap:
            line = left.end_lineno + gap[: match.start()].count("\n")  # type: ignore[attr-defined]
            self.found.append((kind, line, self.statement, start + match.start(), start + match.end(), new))

    # what is left alone: annotations, decorators, docstrings, the text of messages

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if default is not None:
                self.visit(default)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            if not isinstance(node.target, ast.Name):
                self.add("dropped statement", node, "pass")
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # positions inside it are right from Python 3.12 on only

    def visit_Raise(self, node: ast.Raise) -> None:
        self.in_message, before = True, self.in_message
        self.generic_visit(node)
        self.in_message = before

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if not isinstance(node.value, (ast.Yield, ast.YieldFrom, ast.Await)):
            self.add("dropped statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id in ("__all__", "__slots__") for target in node.targets):
            return
        if any(not isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets):  # a lost name is a NameError: too easy
            self.add("dropped statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("dropped statement", node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add("dropped statement", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and not node.value.value):  # None does as well as False
            self.add("lost result", node, "return None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not node.orelse and isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break)):
            self.add("removed check", node.test, "False")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if all(item.optional_vars is None for item in node.items):
            span = self.span(node)[0], self.span(node.items[-1].context_expr)[1]
            self.add("lost context", node, "if True", span)
        self.generic_visit(node)

    # expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self.add_operator("flipped comparison", left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.add_operator("exchanged boolean", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("exchanged boolean", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not text:
            self.add_operator("changed arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add("exchanged branches", node, f"{self.text(node.orelse)} if {self.text(node.test)} else {self.text(node.body)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in TYPES_AS_TEXT:
            for argument in node.args[1:]:
                self.visit(argument)
            return
        arguments = sorted([*node.args, *node.keywords], key=self.span)
        if arguments:
            span = self.span(arguments[0])[0], self.span(arguments[-1])[1]
            for lost in self._losable(node):
                kept = [self.text(argument) for argument in arguments if argument is not lost]
                self.add("lost argument", lost, ", ".join(kept), span)
        self.in_message, before = self.in_message or bool(MESSAGES.search(name)), self.in_message
        self.generic_visit(node)
        self.in_message = before

    @staticmethod
    def _losable(node: ast.Call) -> Iterator[ast.AST]:
        yield from (keyword for keyword in node.keywords if keyword.arg is not None and keyword.arg not in ("help", "stacklevel"))
        if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
            yield node.args[-1]

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("exchanged boolean", node, str(not value))
        elif isinstance(value, int):
            self.add("changed constant", node, str(value + 1))
        elif isinstance(value, float):
            self.add("changed constant", node, repr(value * 2 + 1))
        elif isinstance(value, str) and value and not self.in_message:
            self.add("changed constant", node, repr(value + "?"))
        elif isinstance(value, bytes) and value:
            self.add("changed constant", node, repr(value + b"?"))

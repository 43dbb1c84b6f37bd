"""Pickles read as data. Nothing that a pickle names is imported, called or built: names, calls and objects become records of what it
asks for.

What comes out is plain: `None`, numbers, text, bytes, tuples, lists, `Pairs` for dictionaries (a `dict` could be made slow with keys whose
hashes collide), and the three records below. Every length is checked against the bytes that are there, and the memo is a dictionary, so
the memory taken is in proportion to the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any


class PickleError(ValueError):
    """Not a pickle of the kind that checkpoints hold."""


class UnknownNameError(PickleError):
    """The pickle asks for something that no checkpoint needs."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it asks for {name}")
        self.name = name


class Name:
    """A class or function that the pickle asks for. It is never looked up."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full


class Call:
    """An object that the pickle constructs: what it calls, with which arguments, and the state and content it then sets."""

    __slots__ = ("arguments", "content", "function", "state")

    def __init__(self, function: str, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.state: Any = None
        self.content: Pairs | list[Any] | None = None


class Reference:
    """A persistent id: how `torch.save` refers to storages."""

    __slots__ = ("identity",)

    def __init__(self, identity: Any) -> None:
        self.identity = identity


class Pairs(list[tuple[Any, Any]]):
    """A dictionary: its keys and values in the order in which they were set."""

    __slots__ = ()


Known = Mapping[str, frozenset[str]]
"""Module -> the names in it that a pickle may ask for."""

_LONGEST_INTEGER = 255  # bytes, what LONG1 can hold; more only serves to make arithmetic slow
_LONGEST_NAME = 1000


def read(data: Any, known: Known, position: int = 0, references: list[Reference] | None = None) -> tuple[Any, int]:
    """The value of the pickle that begins at `position` of the bytes, and where it ends. Persistent ids are also added to `references`."""
    reader = _Reader(data, known, position, references if references is not None else [])
    try:
        return reader.run(), reader.position
    except IndexError as error:  # an empty stack
        raise PickleError("an operation without its operands") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise PickleError(f"malformed ({type(error).__name__})") from error


class _Reader:
    def __init__(self, data: Any, known: Known, position: int, references: list[Reference]) -> None:
        self.data, self.known, self.position, self.references = data, known, position, references
        self.end = len(data)
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            code = self.byte()
            if code == _STOP:
                return self.stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PickleError(f"operation {code:#x}, which torch.save and PyTorch's checkpoints do not use")
            operation(self)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.end:
            raise PickleError("it ends in the middle of a value")
        content = bytes(self.data[self.position : end])
        self.position = end
        return content

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _LONGEST_NAME)
        if end < 0:
            raise PickleError("a name without an end")
        text = self.take(end + 1 - self.position)[:-1]
        return text.decode()

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    # What the operations do

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a name that is not text")
        if name not in self.known.get(module, ()):
            raise UnknownNameError(f"{module[:_LONGEST_NAME]}.{name[:_LONGEST_NAME]}")
        self.stack.append(Name(f"{module}.{name}"))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise PickleError("it calls something that is not a function or class")
        self.stack.append(Call(function.full, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Call) or target.state is not None:
            raise PickleError("it sets the state of something that is not a new object")
        target.state = state

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Call) and target.content is None:
            target.content = []
        content = target.content if isinstance(target, Call) else target
        if not isinstance(content, list) or isinstance(content, Pairs):
            raise PickleError("it appends to something that is not a list")
        content.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Call) and target.content is None:
            target.content = Pairs()
        content = target.content if isinstance(target, Call) else target
        if not isinstance(content, Pairs) or len(items) % 2:
            raise PickleError("it sets items of something that is not a dictionary")
        content.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def tuple(self, count: int | None = None) -> None:
        items = self.since_mark() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        self.stack.append(tuple(items))

    def set(self) -> None:
        made = Call("builtins.frozenset", ())
        made.content = self.since_mark()
        self.stack.append(made)

    def refer(self) -> None:
        self.references.append(Reference(self.stack.pop()))
        self.stack.append(self.references[-1])

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise PickleError("it reads a memo entry that it never stored")
        self.stack.append(self.memo[index])

    def note(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def pop_mark(self) -> None:
        self.since_mark()

    def integer(self, length: int) -> None:
        if length > _LONGEST_INTEGER:
            raise PickleError(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def text(self, length: int) -> None:
        self.stack.append(self.take(length).decode("utf-8", "surrogatepass"))

    def frame(self) -> None:
        if self.number("<Q") > self.end - self.position:
            raise PickleError("a frame longer than the pickle")

    def protocol(self) -> None:
        version = self.byte()
        if version > 5:
            raise PickleError(f"protocol {version}")


def _push(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(make(reader))


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.protocol,
    0x95: _Reader.frame,
    ord("("): _Reader.mark,
    ord("0"): _Reader.pop,
    ord("1"): _Reader.pop_mark,
    ord("2"): _push(lambda reader: reader.stack[-1]),
    # Values
    ord("N"): _push(lambda reader: None),
    0x88: _push(lambda reader: True),
    0x89: _push(lambda reader: False),
    ord("K"): _push(lambda reader: reader.byte()),
    ord("M"): _push(lambda reader: reader.number("<H")),
    ord("J"): _push(lambda reader: reader.number("<i")),
    ord("G"): _push(lambda reader: reader.number(">d")),
    0x8A: lambda reader: reader.integer(reader.byte()),
    0x8B: lambda reader: reader.integer(reader.number("<I")),
    ord("U"): lambda reader: reader.text(reader.byte()),
    0x8C: lambda reader: reader.text(reader.byte()),
    ord("X"): lambda reader: reader.text(reader.number("<I")),
    0x8D: lambda reader: reader.text(reader.number("<Q")),
    ord("C"): _push(lambda reader: reader.take(reader.byte())),
    ord("B"): _push(lambda reader: reader.take(reader.number("<I"))),
    0x8E: _push(lambda reader: reader.take(reader.number("<Q"))),
    # Containers
    ord(")"): _push(lambda reader: ()),
    ord("t"): _Reader.tuple,
    0x85: lambda reader: reader.tuple(1),
    0x86: lambda reader: reader.tuple(2),
    0x87: lambda reader: reader.tuple(3),
    ord("]"): _push(lambda reader: []),
    ord("a"): lambda reader: reader.append([reader.stack.pop()]),
    ord("e"): lambda reader: reader.append(reader.since_mark()),
    ord("}"): _push(lambda reader: Pairs()),
    ord("s"): _Reader.set_item,
    ord("u"): lambda reader: reader.set_items(reader.since_mark()),
    0x8F: _push(lambda reader: Call("builtins.set", ())),
    0x90: lambda reader: reader.append(reader.since_mark()),
    0x91: _Reader.set,
    # Names and objects
    ord("c"): lambda reader: reader.name(reader.line(), reader.line()),
    0x93: _Reader.stack_name,
    ord("R"): _Reader.call,
    0x81: _Reader.call,
    ord("b"): _Reader.build,
    ord("Q"): _Reader.refer,
    # The memo
    ord("h"): lambda reader: reader.recall(reader.byte()),
    ord("j"): lambda reader: reader.recall(reader.number("<I")),
    ord("q"): lambda reader: reader.note(reader.byte()),
    ord("r"): lambda reader: reader.note(reader.number("<I")),
    0x94: lambda reader: reader.note(len(reader.memo)),
}

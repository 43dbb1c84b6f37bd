"""Malicious flatbuffer checkpoints, and files that a later release may write."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.errors import CorruptFileError, MissingFileError, UnsupportedError
from torch_ort_ckpt.formats.ort.flatbuffer import Field, Reader

from ..fuzz.mutate import limited_memory, peak_memory
from .hostile import checkpoint, group, module, official, place, poke, properties, states, tensor

W = (1, 0, "0")  # the first trainable tensor


def plain() -> bytes:
    """Well-formed, with one of everything."""
    return official(
        checkpoint(
            module([tensor(b"w"), tensor(b"x")], [tensor(b"f"), tensor(b"s", (1,), None, 8, Field(5, "strings", [b"text"]))]),
            Field(2, "tables", [group(states=[states(b"w", tensor(b"momentum0"))])]),
            properties(ints=[[Field(0, "string", b"epoch"), Field(1, "int64", 3)]]),
        )
    )


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """The number of Python calls: a measure of work that is the same on every machine."""
    count = [0]

    def called(frame: object, event: str, argument: object) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        yield count
    finally:
        sys.setprofile(None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def refused(path: Path, data: bytes, field: str, message: str, kind: type[toc.CheckpointError] = CorruptFileError) -> toc.CheckpointError:
    path.write_bytes(data)
    for mmap in (True, False):
        with pytest.raises(kind, match=message) as caught:
            toc.load(path, mmap=mmap)
        assert caught.value.path == str(path)
        assert caught.value.field == field
    return caught.value


def test_what_the_official_builder_makes_loads(path: Path) -> None:
    path.write_bytes(plain())
    state = toc.load(path)
    assert list(state.parameters) == ["w", "x", "f", "s"]
    assert state.step == 3
    assert state.properties == {"epoch": 3}


HUGE = (1 << 32) - 1
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "count of tensors": (lambda d: poke(d, place(d, 1, 0, "#"), "I", HUGE), "module_state.requires_grad_params", "more than the file"),
    "count of bytes": (lambda d: poke(d, place(d, *W, 4, "#"), "I", HUGE), "module_state.requires_grad_params[0].raw_data", "more than"),
    "count of dims": (lambda d: poke(d, place(d, *W, 2, "#"), "I", HUGE), "module_state.requires_grad_params[0].dims", "more than"),
    "count of groups": (lambda d: poke(d, place(d, 2, "#"), "I", HUGE), "root.optimizer_groups", "more than the file"),
    "count of strings": (lambda d: poke(d, place(d, 1, 1, "1", 5, "#"), "I", 1 << 30), "module_state.frozen_params[1].string_data", "more"),
    "length of a name": (lambda d: poke(d, place(d, *W, 0, "#"), "I", HUGE), "module_state.requires_grad_params[0].name", "more than"),
    "offset to nowhere": (lambda d: poke(d, place(d, 1), "I", 1 << 31), "root.module_state", "outside the file"),
    "offset that wraps": (lambda d: poke(d, place(d, 2), "I", (1 << 32) - 8), "root.optimizer_groups", "outside the file"),
    "offset to itself": (lambda d: poke(d, place(d, *W), "I", 0), "module_state.requires_grad_params[0]", "points at itself"),
    "root outside": (lambda d: poke(d, 0, "I", 1 << 31), "root", "outside the file"),
    "vtable outside": (lambda d: poke(d, struct.unpack_from("<I", d)[0], "i", 1 << 30), "root", "vtable outside"),
    "vtable after the end": (lambda d: poke(d, struct.unpack_from("<I", d)[0], "i", -(1 << 30)), "root", "vtable outside"),
    "vtable of odd size": (lambda d: poke(d, vtable(d), "H", 13), "root", "impossible size 13"),
    "vtable of huge size": (lambda d: poke(d, vtable(d), "H", 65534), "root", "impossible size 65534"),
    "table of huge size": (lambda d: poke(d, vtable(d) + 2, "H", 65535), "root", "impossible size 65535"),
    "table too small": (lambda d: poke(d, vtable(d) + 2, "H", 4), "root", "outside its table"),
    "field on the link": (lambda d: poke(d, vtable(d) + 4, "H", 2), "root.version", "outside the file or misaligned"),
    "string without end": (lambda d: poke(d, place(d, *W, 0, "#") + 5, "B", 65), "module_state.requires_grad_params[0].name", "terminator"),
    "name not UTF-8": (lambda d: poke(d, place(d, *W, 0, "#") + 4, "B", 0xFF), "module_state.requires_grad_params[0].name", "UTF-8"),
    "negative size": (
        lambda d: poke(d, place(d, *W, 2, "#") + 4, "q", -2),
        "module_state.requires_grad_params[0].dims",
        "negative size -2",
    ),
    "other size": (lambda d: poke(d, place(d, *W, 2, "#") + 4, "q", 3), "module_state.requires_grad_params[0].raw_data", "need 12"),
    "size of 2**62": (lambda d: poke(d, place(d, *W, 2, "#") + 4, "q", 1 << 62), "module_state.requires_grad_params[0].raw_data", "need"),
    "no strings": (lambda d: poke(d, place(d, 1, 1, "1", 5, "#"), "I", 0), "module_state.frozen_params[1].string_data", "holds 0 strings"),
}


def vtable(data: bytes) -> int:
    root = struct.unpack_from("<I", data)[0]
    return int(root - struct.unpack_from("<i", data, root)[0])


@pytest.mark.parametrize("what", DAMAGE)
def test_one_damaged_number_is_named(what: str, path: Path) -> None:
    change, field, message = DAMAGE[what]
    error = refused(path, change(plain()), field, message)
    assert error.remedy is not None


@pytest.mark.parametrize(
    "dims",
    [(1 << 62, 4), (1 << 32, 1 << 32), (1 << 31, 1 << 31, 4), (3, 0x5555555555555556 // 2 * 2 + 1)],
    ids=["2**64", "2**64 in halves", "2**64 in three", "just above"],
)
def test_sizes_whose_product_wraps_to_nothing(dims: tuple[int, ...], path: Path) -> None:
    data = official(checkpoint(module([tensor(b"w", dims, b"")])))
    refused(path, data, "module_state.requires_grad_params[0].raw_data", "holds 0 bytes")


def test_zero_times_huge_is_a_shape_or_an_error(path: Path) -> None:
    path.write_bytes(official(checkpoint(module([tensor(b"w", (0, 1 << 40), b"")]))))
    assert toc.load(path).trainable["w"].shape == (0, 1 << 40)
    data = official(checkpoint(module([tensor(b"w", (0, 1 << 62, 1 << 62), b"")])))
    refused(path, data, "module_state.requires_grad_params[0].dims", "impossible shape")


def test_more_dimensions_than_anyone_has(path: Path) -> None:
    data = official(checkpoint(module([tensor(b"w", (1 << 62,) * 20000, b"")])))
    refused(path, data, "module_state.requires_grad_params[0].dims", "20000 dimensions")


def test_one_table_used_twice(path: Path) -> None:
    shared = tensor(b"w")
    refused(path, official(checkpoint(module([shared, shared]))), "module_state.requires_grad_params[1].name", "occurs twice")
    moments = states(b"w", shared)
    data = official(checkpoint(Field(2, "tables", [group(b"a", [moments]), group(b"b", [moments])])))
    refused(path, data, "optimizer_groups[1].optimizer_states[0]", "overlaps another part")


def test_a_graph_of_shared_vectors_does_not_multiply(path: Path) -> None:
    """200 groups sharing a vector of 200 parameters sharing a vector of 200 tensors: eight million tensors in a small file."""
    tensors = [tensor(b"m%d" % index) for index in range(200)]
    params = [[Field(0, "string", b"p%d" % index), Field(1, "tables", tensors)] for index in range(200)]
    groups = [[Field(0, "string", b"g%d" % index), Field(3, "tables", params)] for index in range(200)]
    data = official(checkpoint(Field(2, "tables", groups)))
    path.write_bytes(data)
    with counted_calls() as calls, pytest.raises(CorruptFileError, match="add up to more than the file"):
        toc.load(path)
    assert calls[0] < 1_000_000


def test_overlapping_data(path: Path) -> None:
    shared = bytearray(8)
    data = official(checkpoint(module([tensor(b"w", data=shared), tensor(b"x", data=shared)])))
    refused(path, data, "module_state.requires_grad_params[1].raw_data", "overlaps another part")


def test_a_shared_string_does_not_multiply(path: Path) -> None:
    text = b"A" * (1 << 20)
    texts = [text] * 100_000
    data = official(checkpoint(module([tensor(b"w", (len(texts),), None, 8, Field(5, "strings", texts))])))
    with limited_memory(), peak_memory(True) as peak:
        error = refused(path, data, "module_state.requires_grad_params[0].string_data[15]", "text outgrows the file")
    assert peak[0] < 100 << 20
    assert len(str(error)) < 1000


def test_short_strings_may_be_shared(path: Path) -> None:
    texts = [b"label"] * 1000
    path.write_bytes(official(checkpoint(module([tensor(b"w", (1000,), None, 8, Field(5, "strings", texts))]))))
    assert toc.load(path).trainable["w"].tolist() == ["label"] * 1000


def test_a_long_vtable_is_checked_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand tables that share a vtable of thirty thousand fields: checking it for each would take minutes."""
    checked: list[int] = []
    real = Reader.vtable
    monkeypatch.setattr(Reader, "vtable", lambda self, position, table: (checked.append(position), real(self, position, table))[1])
    data = bytearray(official(checkpoint(properties(ints=[[Field(0, "string", b"p%d" % index)] for index in range(20_000)]))))
    data += bytes(-len(data) % 2)
    long = len(data)
    data += struct.pack("<HHH", 60_004, 8, 4) + bytes(60_000 - 2)
    first = place(data, 3, 0, "0")
    for slot in range(first, first + 4 * 20_000, 4):
        table = slot + struct.unpack_from("<I", data, slot)[0]
        struct.pack_into("<i", data, table, table - long)
    path.write_bytes(data)
    assert len(toc.load(path).properties) == 20_000
    assert checked.count(long) == 1
    assert len(checked) < 10


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..\\..\\x", "C:\\x", "nul\0inside", "\x1b[31m", "имя", ""])
@pytest.mark.parametrize("external", [False, True])
def test_names_are_only_names(name: str, external: bool, path: Path) -> None:
    path.write_bytes(
        official(
            checkpoint(
                module([tensor(name.encode())]), Field(2, "tables", [group(name.encode(), [states(name.encode(), tensor(name.encode()))])])
            )
        )
    )
    state = toc.load(path)
    assert list(state.trainable) == list(state.optimizer) == [name]
    toc.save(state, path, external_data=external)
    assert toc.load(path) == state
    assert set(os.listdir(path.parent)) == ({"checkpoint", "checkpoint.data"} if external else {"checkpoint"})


def test_names_that_occur_twice(path: Path) -> None:
    again = [Field(0, "string", b"n"), Field(1, "string", b"v")]
    number = [Field(0, "string", b"n"), Field(1, "int64", 1)]
    params = [states(b"w"), states(b"w")]
    cases = [
        (checkpoint(module([tensor(b"w"), tensor(b"w")])), "module_state.requires_grad_params[1].name"),
        (checkpoint(module([tensor(b"w")], [tensor(b"w")])), "w"),
        (checkpoint(Field(2, "tables", [group(), group()])), "optimizer_groups[1].group_name"),
        (
            checkpoint(Field(2, "tables", [group(states=params)])),
            "optimizer_groups[0].optimizer_states[1].param_name",
        ),
        (checkpoint(properties(ints=[number], strings=[again])), "property_bag.strings[0].name"),
    ]
    for root, field in cases:
        refused(path, official(root), field, "twice|both trainable and frozen")


def test_a_name_without_end_does_not_fill_the_log(path: Path) -> None:
    name = b"A" * 1_000_000
    path.write_bytes(official(checkpoint(module([tensor(name), tensor(name)]))))
    with pytest.raises(CorruptFileError, match="occurs twice") as caught:
        toc.load(path)
    assert len(str(caught.value)) < 5000


def test_a_nameless_tensor(path: Path) -> None:
    refused(path, official(checkpoint(module([tensor()[1:]]))), "module_state.requires_grad_params[0].name", "missing")


@pytest.mark.parametrize("number", [0, 14, 15, 21, 22, 99, -1])
def test_element_types_that_nobody_has(number: int, path: Path) -> None:
    data = official(checkpoint(module([tensor(b"w", dtype=number)])))
    refused(path, data, "module_state.requires_grad_params[0] (w)", f"element type {number}", UnsupportedError)


@pytest.mark.parametrize("version", [0, 3, -1, (1 << 31) - 1])
def test_an_unknown_version_comes_with_the_way_out(version: int, path: Path) -> None:
    error = refused(path, official(checkpoint(module([tensor()]), version=version)), "version", f"version {version}", UnsupportedError)
    assert "update torch-ort-ckpt" in str(error)


def test_fields_of_the_future_are_tolerated(path: Path) -> None:
    later = [
        Field(20, "int64", 5),
        Field(21, "string", b"new"),
        Field(22, "blob", bytes(100)),
        Field(23, "table", [Field(3, "bool", True)]),
        Field(24, "float32", 1.5),
    ]
    root = [
        *checkpoint(
            module([[*tensor(b"w"), *later]], None, *later),
            Field(2, "tables", [[*group(states=[[*states(b"w", [*tensor(b"momentum0"), *later]), *later]]), *later]]),
        ),
        *later,
    ]
    path.write_bytes(official(root))
    state = toc.load(path)
    expected = toc.CheckpointState(
        trainable={"w": torch.zeros(2)}, optimizer={"group0": toc.OptimizerGroup(3, 0.0, None, {"w": {"momentum0": torch.zeros(2)}})}
    )
    assert state == expected


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, '{"group0": ' * 400 + "1" + "}" * 400, '{"group0": {"lr": 1e999}', "\udcff", "1" * 10_000],
    ids=["empty", "a list", "deep", "deep objects", "cut", "not UTF-8", "long number"],
)
def test_our_own_properties_damaged(text: str, path: Path) -> None:
    for key in ("optimizer", "floats", "partitions"):
        name = f"torch_ort_ckpt.{key}"
        entry = [Field(0, "string", name.encode()), Field(1, "string", text.encode("utf-8", "surrogateescape"))]
        refused(path, official(checkpoint(Field(2, "tables", [group()]), properties(strings=[entry]))), name, "JSON object")


def test_our_own_properties_with_numbers_that_no_float_holds(path: Path) -> None:
    def with_property(key: str, text: str) -> bytes:
        entry = [Field(0, "string", f"torch_ort_ckpt.{key}".encode()), Field(1, "string", text.encode())]
        return official(checkpoint(Field(2, "tables", [group()]), properties(strings=[entry])))

    vast = "1" + "0" * 400
    path.write_bytes(with_property("optimizer", f'{{"group0": {{"lr": {vast}, "step": 3, "initial_lr": {vast}}}}}'))
    assert toc.load(path).optimizer["group0"].lr is None
    refused(path, with_property("partitions", '{"w": {"original_dim": [Infinity]}}'), "partitions", "unreadable partition")
    refused(path, with_property("partitions", '{"w": 5}'), "partitions", "unreadable partition")


@pytest.mark.parametrize("content", [b"", b"O", b"ODTC", b"\x08\0\0\0ODT", b"\x08\0\0\0XXXX", bytes(64)])
def test_what_is_not_such_a_file(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(toc.CheckpointError, match="not a checkpoint in any known format") as caught:
        toc.load(path)
    assert caught.value.path == str(path)
    with pytest.raises(CorruptFileError, match="does not start with"):
        toc.load(path, format="ort")


def test_only_a_head(path: Path) -> None:
    refused(path, b"\x08\0\0\0ODTC", "root", "outside the file")


def test_a_number_that_the_end_of_the_file_cuts(path: Path) -> None:
    table = struct.pack("<I4sHHHHi", 16, b"ODTC", 6, 5, 4, 0, 8) + b"\2"
    refused(path, table, "root.version", "outside the file")


def test_what_is_not_a_file_at_all(tmp_path: Path) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
    else:
        (tmp_path / "fifo").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "loop", "x" * 300, "nul\0"):
        for format in (None, "ort"):
            with pytest.raises(toc.CheckpointError) as caught:
                toc.load(tmp_path / name, format=format)
            assert caught.value.path == str(tmp_path / name)
    for name in ("absent", "fifo/below"):
        with pytest.raises(MissingFileError, match="no such file"):
            toc.load(tmp_path / name)
    with pytest.raises(toc.CheckpointError):
        toc.load(tmp_path)
    with pytest.raises(toc.CheckpointError, match="regular file"):
        toc.load(tmp_path, format="ort")
    with pytest.raises(toc.CheckpointError):
        toc.load("/dev/zero")

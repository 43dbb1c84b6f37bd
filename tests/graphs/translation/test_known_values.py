"""Nodes whose inputs are all known when a graph is translated, and nodes with a single input: every one of them against `onnx`'s own
reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.translation import translate

FLOATS = np.array([[1.5, -2.0, 3.25]], np.float32)
INTS = np.array([[5, -7, 2]], np.int64)


def one_node(kind: str, inputs: dict[str, Any], *, outputs: int = 1, opset: int = 18, known: bool = True, **attributes: Any) -> Any:
    """A graph of one node whose inputs are constants, or with `known` False inputs of the graph."""
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in inputs.items()]
    names = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(kind, list(inputs), names, **attributes)
    given = [] if known else [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in constants]
    graph = helper.make_graph(
        [node, helper.make_node("Neg", ["x"], ["z"])],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]), *given],
        [*(helper.make_empty_tensor_value_info(name) for name in names), helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])],
        constants if known else [],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def check(kind: str, inputs: dict[str, Any], **settings: Any) -> None:
    for known in (True, False):
        model = one_node(kind, inputs, known=known, **settings)
        feeds = {"x": np.ones(1, np.float32), **({} if known else {name: np.asarray(value) for name, value in inputs.items()})}
        expected = ReferenceEvaluator(model).run(None, feeds)
        translation = translate(model)
        found = translation.module.forward(*(torch.from_numpy(np.array(feeds[name])) for name in translation.inputs))
        for value, reference in zip(found, expected, strict=True):
            reference = torch.from_numpy(np.array(reference))
            assert value.dtype == reference.dtype
            torch.testing.assert_close(value, reference, equal_nan=True)


def case(kind: str, *inputs: Any, **settings: Any) -> Any:
    shapes = "_".join(f"{np.asarray(value).dtype}{list(np.asarray(value).shape)}".replace(" ", "") for value in inputs)
    extra = "_".join(f"{key}={value}" for key, value in settings.items() if isinstance(value, int))
    return pytest.param(kind, {f"i{place}": value for place, value in enumerate(inputs)}, settings, id=f"{kind}-{shapes}-{extra}")


def value(number: Any, dtype: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([number], dtype))


SINGLE = [
    case(kind, np.asarray(given), **({"axis": 0} if kind == "Concat" else {}))
    for kind in ("Max", "Min", "Sum", "Mean", "Concat")
    for given in (FLOATS, FLOATS[0], INTS, INTS[0], np.float32(2.5), np.int64(3))
    if not (kind == "Concat" and np.asarray(given).ndim == 0)
    and not (kind in ("Sum", "Mean") and np.asarray(given).dtype == np.int64)  # floats only
]

CONSTANT = [
    *(
        case("ConstantOfShape", np.array(shape, np.int64), **({} if fill is None else {"value": fill}))
        for shape in ([2, 3], [3], [], [0], [2, 0])
        for fill in (None, value(1.5, np.float32), value(7, np.int64), value(7, np.int32), value(True, np.bool_), value(0.5, np.float64))
    ),
    case("Expand", FLOATS, np.array([2, 3], np.int64)),
    case("Expand", np.float32(1.0), np.array([2], np.int64)),
    case("Reshape", INTS, np.array([3, 1], np.int64)),
    case("Reshape", INTS[0], np.array([-1], np.int64)),
    case("Reshape", INTS[0], np.array([1, 3], np.int64)),
    case("Reshape", np.array([4], np.int64), np.array([], np.int64)),
    case("Reshape", np.int64(4), np.array([1, 1], np.int64)),
    case("Tile", INTS[0], np.array([2], np.int64)),
    case("Tile", FLOATS, np.array([2, 2], np.int64)),
    *(case("Range", *(np.array(n, dtype) for n in (1, 7, 2))) for dtype in (np.int64, np.int32, np.float32, np.float64)),
    case("Unsqueeze", np.int64(4), np.array([0], np.int64)),
    case("Unsqueeze", np.int64(4), np.array([0, 1], np.int64)),
    case("Unsqueeze", INTS[0], np.array([0], np.int64)),
    case("Squeeze", np.array([4], np.int64)),
    case("Squeeze", np.array([4, 5], np.int64)),
    case("Squeeze", np.array([4], np.int64), np.array([0], np.int64)),
    *(
        case("Where", np.array(flag), np.array(1, dtype), np.array(0, dtype))
        for flag in (True, [True, False])
        for dtype in (np.int64, np.int32, np.float32, np.float64, np.bool_)
    ),
    *(
        case(kind, np.array(a, np.float32), np.array(b, np.float32))
        for kind in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
        for a, b in ((1.0, 0.0), (-3.0, 2.0))
    ),
    *(
        case(kind, np.array(a, np.int64), np.array(b, np.int64))
        for kind in ("Div", "Mod", "Max", "Min", "Add")
        for a, b in ((-7, 2), (7, -2), ([7, -7], [2]), (7, [2, 3]))
    ),
    case("Add", np.array([], np.int64), np.array([3], np.int64)),
    *(case(kind, np.array(a), np.array(b)) for kind in ("And", "Or", "Xor") for a, b in ((True, False), ([True, False], [True, True]))),
    *(case(kind, np.array(6, np.int64), np.array(3, np.int64)) for kind in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    case("Sqrt", np.array(-4.0, np.float32)),
    case("Sqrt", np.array(2.0, np.float32)),
    case("Cast", np.array(2.7, np.float32), to=int(TensorProto.INT64)),
    case("Cast", np.array(3, np.int64), to=int(TensorProto.FLOAT16)),
    case("Cast", np.array([1, 0], np.int64), to=int(TensorProto.BOOL)),
    case("Shape", FLOATS),
    case("Size", FLOATS),
    case("Gather", INTS[0], np.array(-1, np.int64)),
    case("Gather", INTS[0], np.array([[0, 1]], np.int64)),
    *(
        case("Slice", INTS[0], *(np.array([n], np.int64) for n in (start, end, 0, step)))
        for start, end, step in ((0, 1, 1), (-1, 0, 1), (-1, 99, 1), (2, -99, -1), (1, 1, 1))
    ),
    case("ReduceProd", INTS[0]),
    case("ReduceProd", INTS[0], keepdims=0),
    case("ReduceSum", INTS[0]),
    case("ReduceMax", INTS[0]),
    case("Split", FLOATS, np.array([1, 2], np.int64), outputs=2, axis=1),
    case("Pad", FLOATS, np.array([0, 1, 0, 1], np.int64), np.array(2.0, np.float32)),
    case("Transpose", FLOATS),
    case("CumSum", INTS[0], np.array(0, np.int64)),
    case("OneHot", INTS[0] % 3, np.array(3, np.int64), np.array([0, 1], np.int64)),
    case("TopK", FLOATS, np.array([2], np.int64), outputs=2),
    case("NonZero", FLOATS),
    case("EyeLike", np.zeros((2, 2), np.float32)),
    case("Trilu", np.ones((2, 2), np.float32)),
    case("Clip", FLOATS, np.float32(0.0), np.float32(2.0)),
    case("Gemm", FLOATS, FLOATS.T.copy()),
    case("MatMul", FLOATS, FLOATS.T.copy()),
    case("Einsum", FLOATS, equation="ij->ji"),
    case("Identity", FLOATS),
    case("Softmax", FLOATS),
]


@pytest.mark.parametrize(("kind", "inputs", "settings"), [*SINGLE, *CONSTANT])
def test_a_node_computes_what_the_reference_does(kind: str, inputs: dict[str, Any], settings: dict[str, Any]) -> None:
    check(kind, inputs, **settings)


def test_numbers_that_depend_on_a_shape_stay_right_where_an_operator_takes_only_tensors() -> None:
    """The rows of x, known only when the graph runs: bitwise and exclusive or have no rule for numbers."""
    text = """agraph (float[n] x) => (int64 a, bool b, int64[1] c, int64 d, int64[1, 1] e)
    <int64 zero = {0}, int64 three = {3}, int64[1] first = {0}, int64[2] two_axes = {0, 1}>
    {
        shape = Shape(x)  n = Gather(shape, zero)
        a = BitwiseAnd(n, three)
        large = Greater(n, three)  even = Equal(n, three)
        b = Xor(large, even)
        c = Max(shape)
        d = Max(n)
        e = Unsqueeze(n, two_axes)
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    module = translate(model).module
    for rows in (3, 6):
        a, b, c, d, e = module(torch.zeros(rows))
        assert (a.item(), b.item(), c.tolist(), d.item(), e.tolist()) == (rows & 3, (rows > 3) ^ (rows == 3), [rows], rows, [[rows]])


def test_slices_of_a_shape_may_begin_at_a_place_that_depends_on_it() -> None:
    text = """agraph (float[n, m, k] x) => (int64[p] y)
    <int64 zero = {0}, int64[1] zeros = {0}, int64[1] end = {3}>
    { shape = Shape(x)  n = Gather(shape, zero)  start = Unsqueeze(n, zeros)  y = Slice(shape, start, end) }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    module = translate(model).module
    assert module(torch.zeros(1, 2, 4))[0].tolist() == [2, 4]
    assert module(torch.zeros(2, 2, 4))[0].tolist() == [4]


def test_what_can_t_be_computed_from_constants_is_named() -> None:
    model = one_node("Reshape", {"data": FLOATS, "shape": np.array([5], np.int64)})
    with pytest.raises(toc.CheckpointError, match=r"Reshape.*can't be computed") as caught:
        translate(model)
    assert "node" in str(caught.value)

"""The translator: which part of a graph it takes, how shapes stay Python ints, control flow, and its error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, parser

import torch_ort_ckpt as toc
from tests.truth import DATA
from torch_ort_ckpt.graphs.translation import supported_ops, translate

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


def model(text: str, opset: int = 18, domains: str = "") -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}{domains}]> {text}')


def calls(translation: Any) -> list[Any]:
    return [node.target for node in translation.module.graph.nodes if node.op == "call_function"]


def test_only_the_forward_part_of_a_training_graph_is_taken() -> None:
    training = onnx.load(ADAMW / "training_model.onnx")
    names = [value.name for value in training.graph.input if "." in value.name and "accumulation" not in value.name]
    translation = translate(training, parameters=names)
    assert translation.inputs == ("x", "labels")
    assert len(translation.outputs) == 1
    functions = {getattr(target, "__name__", "") for target in calls(translation)}
    assert {"gemm", "relu", "softmax_cross_entropy_loss"} <= functions
    assert len(calls(translation)) < len(training.graph.node) / 2


def test_any_value_of_the_graph_can_be_an_output() -> None:
    training = onnx.load(ADAMW / "training_model.onnx")
    names = [value.name for value in training.graph.input if "." in value.name and "accumulation" not in value.name]
    translation = translate(training, parameters=names, outputs=["h1"])
    assert translation.parameters == ("fc1.weight", "fc1.bias")
    with pytest.raises(toc.CheckpointError, match="no value named 'nothing'"):
        translate(training, outputs=["nothing"])


@pytest.mark.parametrize(
    ("bias", "sum_of", "outputs", "joined"),
    [
        ("5", "b, product", "y", True),
        ("5", "product, b", "y", True),
        ("1", "b, product", "y", False),  # broadcast, which F.linear does not do
        ("1, 5", "b, product", "y", False),
        ("n", "b, product", "y", False),  # not known to be one per row of the weight
        ("5", "b, product", "y, product", False),  # the product itself is wanted too
    ],
)
def test_a_linear_layer_in_three_nodes_becomes_one_function(bias: str, sum_of: str, outputs: str, joined: bool) -> None:
    results = ", ".join(f"float[a, b, 5] {name}" for name in outputs.split(", "))
    text = f"""agraph (float[a, b, 4] x, float[5, 4] w, float[{bias}] b) => ({results})
    {{ turned = Transpose<perm = [1, 0]>(w)  product = MatMul(x, turned)  y = Add({sum_of}) }}"""
    translation = translate(model(text), parameters=["w", "b"])
    names = [getattr(target, "__name__", "") for target in calls(translation)]
    assert names == (["linear"] if joined else ["transpose", "matmul", "add"])
    x, w, b = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn([5 if size == "n" else int(size) for size in bias.split(", ")])
    torch.testing.assert_close(translation.module(x, w, b)[0], x @ w.t() + b)


def test_shape_arithmetic_stays_on_python_ints() -> None:
    """What exporters write for `x.view(x.size(0), -1, 4).expand(x.size(0) * 2 // 2, ...)`: no tensor is read back."""
    translation = translate(
        model("""agraph (float[n, k] x) => (float[a, b, c] y)
        <int64 zero = {0}, int64[1] minus = {-1}, int64[1] four = {4}, int64[1] axes = {0}, int64 two = {2}>
        {
            shape = Shape(x)
            n = Gather(shape, zero)
            doubled = Mul(n, two)
            halved = Div(doubled, two)
            first = Unsqueeze(halved, axes)
            target = Concat<axis = 0>(first, minus, four)
            y = Reshape(x, target)
        }""")
    )
    assert torch.Tensor.tolist not in calls(translation)
    assert torch.tensor not in calls(translation)
    for rows in (2, 5):
        (y,) = translation.module(torch.arange(rows * 8.0).reshape(rows, 8))
        assert y.shape == (rows, 2, 4)


def test_what_depends_on_constants_only_is_computed_once() -> None:
    translation = translate(
        model("""agraph (float[n] x) => (float[n] y)
        <float[2] a = {1.0, 2.0}, float[2] b = {3.0, 4.0}>
        { c = Add(a, b)  d = Exp(c)  y = Mul(x, d) }""")
    )
    assert len(calls(translation)) == 1
    torch.testing.assert_close(translation.module(torch.ones(2))[0], torch.tensor([4.0, 6.0]).exp())


def test_softmax_changed_its_meaning_with_opset_13() -> None:
    x = torch.randn(2, 3, 4)
    text = "agraph (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Softmax<axis = 1>(x) }"
    torch.testing.assert_close(translate(model(text, 12)).module(x)[0], x.flatten(1).softmax(1).reshape(x.shape))
    torch.testing.assert_close(translate(model(text, 13)).module(x)[0], x.softmax(1))


def test_a_branch_known_beforehand_is_inlined() -> None:
    text = """agraph (float[n] x) => (float[n] y) <bool yes = {1}>
    { y = If (yes) <then_branch = g1 () => (float[n] a) { a = Exp(x) }, else_branch = g2 () => (float[n] b) { b = Neg(x) }> }"""
    translation = translate(model(text))
    assert calls(translation) == [torch.exp]


@pytest.mark.parametrize("rows", [2, 5])
def test_a_branch_chosen_by_a_shape_needs_no_tensor(rows: int) -> None:
    text = """agraph (float[n] x) => (float[n] y) <int64 zero = {0}, int64 three = {3}>
    {
        shape = Shape(x)  n = Gather(shape, zero)  large = Greater(n, three)
        y = If (large) <then_branch = g1 () => (float[n] a) { a = Exp(x) }, else_branch = g2 () => (float[n] b) { b = Neg(x) }>
    }"""
    translation = translate(model(text))
    x = torch.randn(rows)
    torch._dynamo.reset()
    compiled = torch.compile(translation.module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], x.exp() if rows > 3 else -x)


def test_a_loop_runs_and_carries_gradients() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["v", "w"], ["v_out"]),  # w is captured from outside
            helper.make_node("Identity", ["go"], ["go_out"]),
            helper.make_node("Identity", ["v_out"], ["each"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [2]),
        ],
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, kind, shape in (("go_out", 9, []), ("v_out", 1, [2]), ("each", 1, [2]))
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["trips", "", "x"], ["last", "all"], body=body)],
        "loop",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("w", 1, [2])],
        [helper.make_tensor_value_info("last", 1, [2]), helper.make_tensor_value_info("all", 1, [3, 2])],
        [helper.make_tensor("trips", TensorProto.INT64, [], [3])],
    )
    translation = translate(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), parameters=["w"])
    x, w = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.5], requires_grad=True)
    last, every = translation.module(x, w)
    torch.testing.assert_close(last, x * w**3)
    assert every.shape == (3, 2)
    last.sum().backward()
    torch.testing.assert_close(w.grad, 3 * x * w.detach() ** 2)


def test_an_unknown_operator_is_named_with_its_place_and_the_way_to_add_it() -> None:
    text = "agraph (float[n] x) => (float[n] y) { a = Exp(x)  y = acme.Twist(a) }"
    with pytest.raises(toc.CheckpointError) as caught:
        translate(model(text, domains=', "acme" : 1'))
    message = str(caught.value)
    assert "acme::Twist (opset 1)" in message
    assert "node 'y'" in message
    assert 'register_op("Twist", domain="acme")' in message


@pytest.mark.usefixtures("_restored_registry")
def test_an_operator_can_be_added() -> None:
    @toc.register_op("Twist", domain="acme")
    def twist(x: torch.Tensor, *, amount: float = 1.0) -> torch.Tensor:
        return x.flip(0) * amount

    text = "agraph (float[n] x) => (float[n] y) { y = acme.Twist<amount = 2.0>(x) }"
    (y,) = translate(model(text, domains=', "acme" : 1')).module(torch.tensor([1.0, 2.0]))
    assert y.tolist() == [4.0, 2.0]
    with pytest.raises(toc.CheckpointError, match="the attribute 'angle' is not supported"):
        translate(model(text.replace("amount", "angle"), domains=', "acme" : 1'))


def test_the_operators_of_training_graphs_are_known() -> None:
    known = supported_ops()
    assert {"BatchNormInternal", "ConcatTraining", "LSTMTraining", "GRUTraining", "Gelu", "QuickGelu", "SkipLayerNormalization"} <= set(
        known["com.microsoft"]
    )
    assert len(known[""]) > 150


def test_the_ort_format_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "training_model.ort").write_bytes(b"\0" * 16)
    artifacts = toc.Artifacts(folder=tmp_path, training_path=tmp_path / "training_model.ort", checkpoint_path=ADAMW / "checkpoint")
    from torch_ort_ckpt.engines import EngineOptions
    from torch_ort_ckpt.engines.torch.engine import make_graph

    with pytest.raises(toc.CheckpointError, match=r"only ONNX Runtime reads the \.ort format"):
        make_graph(artifacts, EngineOptions(), training=True)


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize(("pads", "extra"), [([1, 0], 1), ([0, 1], 1), ([1, 1], 1), ([2, 0], 0)])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_transposed_convolution_with_uneven_padding(bias: str, pads: list[int], extra: int, axes: int) -> None:
    """`output_padding` adds to the far side, which is the bias there, before the padding is cut off."""
    torch.manual_seed(0)
    befores, afters = [pads[0]] * axes, [pads[1]] * axes
    text = (
        f"g (float[1, 2{', n' * axes}] x, float[2, 3{', 3' * axes}] w, float[3] b) => (float[1, 3{', m' * axes}] y) "
        f"{{ y = ConvTranspose <strides = {[2] * axes}, pads = {befores + afters}, output_padding = {[extra] * axes}> (x, w{bias}) }}"
    )
    x, w, b = torch.randn(1, 2, *[4] * axes), torch.randn(2, 3, *[3] * axes), torch.randn(3)
    function = (torch.nn.functional.conv_transpose1d, torch.nn.functional.conv_transpose2d)[axes - 1]
    expected = function(x, w, b if bias else None, stride=2, output_padding=extra)
    for axis in range(2, 2 + axes):
        expected = expected.narrow(axis, pads[0], expected.shape[axis] - sum(pads))
    found = translate(model(text))
    values = {"x": x, "w": w, "b": b}
    (y,) = found.module(*(values[name] for name in (*found.inputs, *found.parameters)))
    torch.testing.assert_close(y, expected)

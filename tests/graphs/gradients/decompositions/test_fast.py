"""The fast forms against autograd at several batch sizes, and against the plain forms beside them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort_ckpt.graphs.gradients.decompositions import after_autograd, fast_convolution, fast_norms, register_decomposition, registry
from torch_ort_ckpt.graphs.gradients.decompositions.fast_convolution import Geometry

from .agreement import check, trace

aten = torch.ops.aten
DOUBLE = torch.float64


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, int, int]:
    two = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = draw(two), draw(two), draw(two)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    height, width = (dilation[i] * (kernel[i] - 1) + 1 + draw(st.integers(0, 4)) for i in (0, 1))
    return Geometry(kernel, stride, padding, dilation, 1), height, width


def _expected(g: Geometry, inputs: int, outputs: int, height: int, width: int, batch: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(batch, inputs, height, width, dtype=DOUBLE)
    weight = torch.randn(outputs, inputs // g.groups, *g.kernel, dtype=DOUBLE, requires_grad=True)
    result = F.conv2d(x, weight, None, g.stride, g.padding, g.dilation, g.groups)
    gradient = torch.randn_like(result)
    (expected,) = torch.autograd.grad(result, weight, gradient)
    return x, gradient, expected


FORMS = {
    "row_by_row": (fast_convolution.row_by_row, 1, 3, 4),
    "deep": (fast_convolution.deep, 1, 3, 4),
    "depthwise": (fast_convolution.depthwise, 4, 4, 4),
    "grouped": (fast_convolution.grouped, 2, 4, 6),
    "grouped, as many as channels": (fast_convolution.grouped, 4, 4, 8),
}


@settings(max_examples=25)
@given(geometries(), st.sampled_from([1, 2, 5]))
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_the_weight_gradient(name, case, batch):
    g, height, width = case
    form, groups, inputs, outputs = FORMS[name]
    g = Geometry(g.kernel, g.stride, g.padding, g.dilation, groups)
    x, gradient, expected = _expected(g, inputs, outputs, height, width, batch)
    torch.testing.assert_close(form(x, gradient, g), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_kernel_of_one_element(batch):
    x, gradient, expected = _expected(Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1), 3, 4, 5, 6, batch)
    torch.testing.assert_close(fast_convolution.pointwise(x, gradient), expected)


CONVOLUTIONS = {
    "few channels": (3, 4, {"kernel_size": 3, "padding": 1}),
    "many channels": (64, 4, {"kernel_size": 3, "padding": 1}),
    "strided": (3, 4, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "pointwise": (3, 4, {"kernel_size": 1}),
    "pointwise strided": (3, 4, {"kernel_size": 1, "stride": 2}),
    "depthwise": (4, 4, {"kernel_size": 3, "padding": 1, "groups": 4}),
    "grouped": (4, 6, {"kernel_size": 3, "groups": 2}),
    "large kernel": (3, 4, {"kernel_size": 7, "padding": 3, "stride": 2}),
}


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_at_three_batch_sizes(name, axes):
    inputs, outputs, options = CONVOLUTIONS[name]
    options = dict(options)
    kernel = [options.pop("kernel_size")] * axes
    forward = (F.conv1d, F.conv2d)[axes - 1]
    batches = [
        [
            torch.randn(n, inputs, *(9, 8)[:axes], dtype=DOUBLE),
            torch.randn(outputs, inputs // options.get("groups", 1), *kernel, dtype=DOUBLE),
        ]
        for n in (3, 1, 7)
    ]
    check(lambda x, weight: forward(x, weight, **options), *batches, dynamic=[[0]], gone=["convolution_backward"], optimize=True)


@pytest.mark.parametrize("axes", [2, 3])
def test_other_convolutions_take_the_plain_form(axes):
    """Images of dynamic size, three dimensions."""
    forward = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    batches = [[torch.randn(n, 3, *[6 + n] * axes), torch.randn(4, 3, *[3] * axes)] for n in (3, 5)]
    check(lambda x, w: forward(x, w), *batches, dynamic=[[0, *range(2, 2 + axes)]], gone=["convolution_backward"], optimize=True)


def test_max_pooling_without_indices():
    batches = [[torch.randn(n, 3, 6, 8)] for n in (3, 1, 7)]
    gone = ["max_pool2d_with_indices_backward", "scatter_add"]
    check(lambda x: F.max_pool2d(x, 2), *batches, dynamic=[[0]], gone=gone, optimize=True)


def test_the_first_of_equal_maxima_gets_the_gradient():
    x = torch.randint(0, 2, (4, 3, 6, 8)).to(DOUBLE)
    check(lambda x: F.max_pool2d(x, 2), [x], optimize=True)


@pytest.mark.parametrize(
    "options", [{"kernel_size": 3}, {"kernel_size": 2, "stride": 1}, {"kernel_size": 2, "padding": 1}, {"kernel_size": [2, 1]}]
)
def test_other_max_pooling_takes_the_plain_form(options):
    batches = [[torch.randn(n, 3, 7, 8)] for n in (3, 5)]
    graph = check(lambda x: F.max_pool2d(x, **options), *batches, dynamic=[[0]], optimize=True)
    assert "scatter_add" in graph.code


@pytest.mark.parametrize(
    "options", [{"kernel_size": 2}, {"kernel_size": [3, 2]}, {"kernel_size": 3, "stride": 2}, {"kernel_size": 2, "divisor_override": 3}]
)
def test_average_pooling(options):
    batches = [[torch.randn(n, 3, 6, 8)] for n in (3, 1, 7)]
    check(lambda x: F.avg_pool2d(x, **options), *batches, dynamic=[[0]], gone=["avg_pool2d_backward"], optimize=True)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_relu(dtype):
    batches = [[torch.randn(n, 5, dtype=dtype)] for n in (3, 1, 7)]
    batches[0][0][0] = torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e30], dtype=dtype)
    gone = ["threshold_backward", "where"] if dtype == torch.float32 else []  # ONNX Runtime has no HardSigmoid of float64
    check(lambda x: torch.relu(x), *batches, dynamic=[[0]], gone=gone, optimize=True)
    check(lambda x: F.threshold(x, 0.3, 2.0), *batches, dynamic=[[0]], optimize=True)
    check(lambda x: F.threshold(x, 0.0, 2.0), *batches, dynamic=[[0]], optimize=True)


def test_plain_graphs_have_no_fast_forms():
    x = torch.randn(2, 3, 4, 4)
    assert "scatter_add" in trace(lambda x: F.max_pool2d(x, 2), [x]).code
    assert "scatter_add" not in trace(lambda x: F.max_pool2d(x, 2), [x], optimize=True).code


def test_what_a_user_registers_comes_before_fast_forms():
    with registry.only_during():

        @register_decomposition(aten.threshold_backward.default)
        def mine(gradient, x, threshold):
            return gradient

        assert after_autograd(optimize=True)[aten.threshold_backward.default] is mine


def test_unpooling():
    batches = [[torch.randn(n, 3, 6, 8)] for n in (3, 5)]
    check(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), *batches, dynamic=[[0]], optimize=True)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from([torch.float32, DOUBLE]))
def test_batch_normalisation(spatial, channels, dtype):
    def normalise(x, weight, bias, mean, variance):
        return F.batch_norm(x, mean.detach().clone(), variance.detach().clone(), weight, bias, True, 0.1, 1e-5)

    vectors = [torch.randn(channels, dtype=dtype), torch.randn(channels, dtype=dtype)]
    statistics = [torch.randn(channels, dtype=dtype), torch.rand(channels, dtype=dtype)]
    batches = [[torch.randn(n, channels, *spatial, dtype=dtype) + 3, *vectors, *statistics] for n in (4, 2, 7)]
    gone = ["native_batch_norm_backward", "_native_batch_norm_legit_functional", "var_mean"]
    check(normalise, *batches, dynamic=[[0]], gone=gone, optimize=True, tolerance=1e-4 if dtype == torch.float32 else 1e-9)


def test_batch_normalisation_and_infinite_running_statistics():
    x, ones = torch.randn(4, 3, 2, 2), torch.ones(3)
    infinite = [torch.full([3], float("inf")), torch.full([3], float("nan"))]
    found = fast_norms.native_batch_norm(x, ones, ones, *infinite, True, 0.1, 1e-5)
    torch.testing.assert_close(found[0], F.batch_norm(x, None, None, ones, ones, True))
    assert found[3].isinf().all()
    assert found[4].isnan().all()


@pytest.mark.parametrize("kind", ["two axes", "no weight", "no statistics"])
def test_other_batch_normalisation_takes_the_plain_form(kind):
    def normalise(x, weight, bias, mean, variance):
        running = (None, None) if kind == "no statistics" else (mean.detach().clone(), variance.detach().clone())
        return F.batch_norm(x, *running, *((None, None) if kind == "no weight" else (weight, bias)), True, 0.1, 1e-5)

    shape = [4] if kind == "two axes" else [4, 5]
    batches = [[torch.randn(n, *shape), *(torch.rand(4) for _ in range(4))] for n in (4, 2, 7)]
    check(normalise, *batches, dynamic=[[0]], optimize=True, tolerance=1e-4)


@pytest.mark.parametrize("ignore_index", [-100, 1])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_cross_entropy(ignore_index, dtype):
    batches = []
    for n in (3, 1, 7):
        labels = torch.randint(0, 5, (n,))
        labels[n - 1] = 2
        labels[: n // 2] = ignore_index
        batches.append([torch.randn(n, 5, dtype=dtype), labels])
    batches[0][0][0, 0] = -float("inf")  # of an ignored row: zero times that would be NaN
    gone = ["nll_loss_forward", "nll_loss_backward", "scatter", "where.ScalarSelf"]

    def loss(scores, labels):
        return F.cross_entropy(scores.clamp(min=-1e30), labels, ignore_index=ignore_index)

    check(loss, *batches, dynamic=[[0], [0]], gone=gone, optimize=True)


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_other_cross_entropies(options, weighted):
    batches = [[torch.randn(n, 5), torch.randint(0, 5, (n,)), torch.rand(5)] for n in (3, 1, 7)]

    def loss(x, labels, weight):
        return F.cross_entropy(x, labels, weight.detach() if weighted else None, **options)

    check(loss, *batches, dynamic=[[0], [0]], optimize=True)

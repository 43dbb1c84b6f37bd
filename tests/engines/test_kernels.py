"""What ORT 1.19.2 computes wrongly is rewritten and comes out right. What it can't run, engine "ort" refuses with the operator's name, and
"auto" runs on PyTorch.

Graphs are written here and differentiated by ORT's own builder, as any artifacts are. `tests/fuzz/test_kernels.py` tries thousands.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort_ckpt as toc
from tests.engines.zoo import FAMILIES
from tests.engines.zoo import export as export_by_ort
from tests.fuzz.chains import Chain
from tests.fuzz.kernels import compare, generate
from tests.official import Official

pytestmark = pytest.mark.ort

Build = Callable[[Chain], None]


def make(build: Build, sample: tuple[int, ...], *, batch: int | str = "batch", opset: int = 15, first: bool = True) -> Chain:
    """A graph with a weight in front of what `build` adds (`first`), so that there is a gradient to pass on."""
    chain = Chain(opset, sample, torch.Generator().manual_seed(0), batch)
    if first:
        chain.then("Mul", ["x", chain.weight(*sample, scale=1.0)], torch.mul)
    build(chain)
    chain.finish()
    return chain


def outcome(chain: Chain, folder: Path, batches: tuple[int, ...] = (3, 1, 4)) -> str:
    """Both engines against PyTorch, with each of the batches in turn."""
    assert generate(chain, folder) is None
    return compare(chain, {"batches": list(batches), "threads": 1}, folder)


def convolve(rank: int, groups: int, *sizes: int) -> Build:
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]

    def build(chain: Chain) -> None:
        for size in sizes:
            inputs = [chain.current, chain.weight(8, chain.shape[1] // groups, *[size] * rank)]
            inputs += [chain.weight(8)] if size > 1 else []
            pads = [size // 2] * rank
            chain.then(
                "Conv", inputs, lambda x, w, b=None, p=pads: function(x, w, b, padding=p, groups=groups), group=groups, pads=pads * 2
            )
            chain.then("Tanh", [chain.current], torch.tanh)

    return build


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_convolutions_in_groups(rank: int, groups: int, sizes: tuple[int, ...], first: bool, tmp_path: Path) -> None:
    sample = (8, 3, 4, 5) if rank == 3 else (8, 9, 6)[: rank + 1]
    assert outcome(make(convolve(rank, groups, *sizes), sample, first=first), tmp_path) == "equal"


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_nothing_is_written_beyond_the_gradient_of_a_convolution(rank: int, groups: int, tmp_path: Path) -> None:
    """In this graph ORT places the first convolution's weight gradient directly behind the gradient that the second one computes."""

    def build(chain: Chain) -> None:
        convolve(rank, groups, 1, 1)(chain)
        chain.nodes.pop()  # the last tanh
        chain.steps.pop()
        chain.current = chain.nodes[-1].output[0]
        chain.then("ReduceSum", [chain.current], lambda x: x.sum(), keepdims=0)
        chain.loss = chain.current

    chain = make(build, ((8, 9), (8, 5, 6), (8, 3, 4, 5))[rank - 1], first=False)
    assert outcome(chain, tmp_path, (3, 3)) == "equal"


@pytest.mark.parametrize("opset", [12, 17])
def test_convolutions_in_groups_in_older_and_newer_graphs(opset: int, tmp_path: Path) -> None:
    assert outcome(make(convolve(3, 4, 1, 3), (8, 3, 4, 2), opset=opset), tmp_path) == "equal"


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Conv1d(8, 16, 1, groups=4), nn.Conv1d(16, 8, 1, groups=4), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(F.gelu(self.first(x))).flatten(1))


def test_a_model_with_convolutions_in_groups_trains_as_in_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = Grouped()
    artifacts = toc.export_artifacts(native, (torch.randn(4, 8, 5),), tmp_path, exporter="torchscript")
    model = toc.OrtModule(artifacts, engine="ort")
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (native, model)]
    for step in range(4):
        x, labels = torch.randn(3 + step, 8, 5), torch.randint(0, 5, (3 + step,))
        losses = [F.cross_entropy(native(x), labels), model(x, labels)]
        torch.testing.assert_close(losses[1], losses[0])
        for (_, optimizer), loss in zip(pairs, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, value in native.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    # The artifacts themselves are right: ORT's own API computes the same gradients.
    official = Official(artifacts, tmp_path, state=model.checkpoint())
    native.zero_grad()
    loss = F.cross_entropy(native(x), labels)
    loss.backward()
    assert abs(float(official.loss(x, labels)) - loss.item()) < 1e-5
    for name, gradient in official.gradients():
        torch.testing.assert_close(torch.from_numpy(gradient), native.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("groups", [1, 2])
def test_automatic_padding(kind: str, groups: int, tmp_path: Path) -> None:
    before, after = {"SAME_UPPER": (0, 1), "SAME_LOWER": (1, 0), "VALID": (0, 0)}[kind]

    def build(chain: Chain) -> None:
        inputs = [chain.current, chain.weight(4, 4 // groups, 2, 2)]
        pad = (before, after, before, after)
        chain.then("Conv", inputs, lambda x, w: F.conv2d(F.pad(x, pad), w, groups=groups), group=groups, auto_pad=kind, kernel_shape=[2, 2])
        settings = {"auto_pad": kind, "kernel_shape": [2, 2], "count_include_pad": 1}
        chain.then("AveragePool", [chain.current], lambda x: F.avg_pool2d(F.pad(x, pad), 2, 1), **settings)

    assert outcome(make(build, (4, 5, 6)), tmp_path) == "equal"


def average(rank: int, *, kernel: int = 3, stride: int = 2, pad: int = 1, inside: int = 1, ceil: int = 0) -> Build:
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]

    def build(chain: Chain) -> None:
        settings: dict[str, Any] = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
        settings |= {"count_include_pad": inside, "ceil_mode": ceil}
        chain.then("AveragePool", [chain.current], lambda x: pool(x, kernel, stride, pad, bool(ceil), bool(inside)), **settings)

    return build


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("batch", ["batch", 3])
def test_average_pooling_of_any_rank_and_batch(rank: int, inside: int, batch: int | str, tmp_path: Path) -> None:
    chain = make(average(rank, inside=inside), (2, 7, 6, 5)[: rank + 1], batch=batch)
    assert outcome(chain, tmp_path) == "equal"


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]])
def test_a_part_of_a_split_that_nobody_uses(used: list[int], tmp_path: Path) -> None:
    def build(chain: Chain) -> None:
        sizes = [1, 2, 3]
        parts = chain.add("Split", [chain.current, chain.constant(sizes)], lambda x: torch.split(x, sizes, 1), outputs=3, axis=1)
        chain.then("Concat", [parts[place] for place in used], lambda *values: torch.cat(values, 1), axis=1)

    assert outcome(make(build, (6,)), tmp_path) == "equal"


@pytest.mark.parametrize("shape", [(1, 1, 4), (4,), (), (3, 1), (3, 4)])
@pytest.mark.parametrize("first", [True, False])
def test_where_broadcasts_a_weight(shape: tuple[int, ...], first: bool, tmp_path: Path) -> None:
    """`torch.where(mask, self.mask_token, x)`."""

    def build(chain: Chain) -> None:
        condition = torch.arange(12).reshape(3, 4) % 5 < 2
        mask, other = chain.constant(condition.numpy(), bool), chain.weight(*shape, scale=1.0)
        pair = [other, chain.current] if first else [chain.current, other]
        chain.then("Where", [mask, *pair], lambda a, b: torch.where(condition, a, b))

    assert outcome(make(build, (3, 4)), tmp_path) == "equal"


def test_where_broadcasts_a_computed_value(tmp_path: Path) -> None:
    def build(chain: Chain) -> None:
        condition = torch.arange(12).reshape(3, 4) % 5 < 2
        (mean,) = chain.add("ReduceMean", [chain.current], lambda x: x.mean(1, keepdim=True), axes=[1], keepdims=1)
        chain.then("Where", [chain.constant(condition.numpy(), bool), mean, chain.current], lambda a, b: torch.where(condition, a, b))

    assert outcome(make(build, (3, 4)), tmp_path) == "equal"


def test_a_transpose_that_moves_nothing_before_a_gemm(tmp_path: Path) -> None:
    """With a batch as large as a sample, ORT's graph optimizer would transpose the batch without an error."""

    def build(chain: Chain) -> None:
        chain.then("Transpose", [chain.current], lambda x: x, perm=[0, 1])
        chain.then("Gemm", [chain.current, chain.weight(6, 6)], torch.matmul)

    assert outcome(make(build, (6,)), tmp_path, (6, 3)) == "equal"


def test_only_one_result_of_topk_is_used(tmp_path: Path) -> None:
    def build(chain: Chain) -> None:
        top = chain.add("TopK", [chain.current, chain.constant([2])], lambda x: tuple(x.topk(2)), outputs=2)
        chain.go_on(top[0])

    assert outcome(make(build, (6,)), tmp_path) == "equal"


# What is refused


def transposed(chain: Chain) -> None:
    weight = chain.weight(4, 2, 3, 3)
    chain.then("ConvTranspose", [chain.current, weight], lambda x, w: F.conv_transpose2d(x, w, stride=2), strides=[2, 2])


def resized(chain: Chain) -> None:
    settings: dict[str, Any] = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    scales = chain.constant([1, 1, 2, 2], "float32")
    chain.then("Resize", [chain.current, "", scales], lambda x: F.interpolate(x, scale_factor=2), **settings)


def flipped(chain: Chain) -> None:
    limits = [chain.constant([value]) for value in (-1, -(2**63) + 1, 2, -1)]
    chain.then("Slice", [chain.current, *limits], lambda x: x.flip(2))


def columns_first(chain: Chain) -> None:
    chain.then("MaxPool", [chain.current], lambda x: F.max_pool2d(x, 2), kernel_shape=[2, 2], strides=[2, 2], storage_order=1)


REFUSED: dict[str, tuple[Build, str]] = {
    "ConvTransposeGrad": (transposed, "Could not find an implementation"),
    "ResizeGrad": (resized, "Could not find an implementation"),
    "SliceGrad": (flipped, "negative step"),
    "MaxPool": (columns_first, "storage_order"),
    "AveragePool": (average(2, kernel=2, pad=0, ceil=1), "wrong number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ort_refuses_by_name_and_auto_takes_torch(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build, words = REFUSED[name]
    chain = make(build, (4, 5, 7))
    assert outcome(chain, tmp_path).startswith("refused")  # and engine "torch" computes what PyTorch computes
    batch = chain.batch(2)
    with pytest.raises(toc.CheckpointError, match=rf"(?s)(?=.*{name}).*{words}"):
        toc.OrtModule(tmp_path, engine="ort")(batch["x"])
    with caplog.at_level(logging.INFO, "torch_ort_ckpt"):
        assert toc.OrtModule(tmp_path).engine.name == "torch"
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("engine: torch"))
    assert name in line
    assert words in line


@pytest.mark.parametrize("name", ["bilstm", "avg_pool_ceil", "conv_transpose", "upsample_nearest", "upsample_bilinear"])
def test_auto_trains_what_ort_has_no_kernel_for(name: str, tmp_path: Path) -> None:
    """Whole models, as they are exported; these are the families that `test_parity.py` can't run on ORT."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    native = family.build().train()
    *inputs, labels = family.batch()
    artifacts = toc.export_artifacts(native, tuple(inputs), tmp_path, exporter="torchscript")
    with pytest.raises(toc.CheckpointError, match=r"(LSTMTraining|AveragePool|ConvTransposeGrad|ResizeGrad)"):
        toc.OrtModule(artifacts, engine="ort")(*inputs, labels)
    model = toc.OrtModule(artifacts)
    assert model.engine.name == "torch"
    twin = copy.deepcopy(native)
    model(*inputs, labels).backward()
    F.cross_entropy(twin(*inputs), labels).backward()
    for key, value in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, value.grad, rtol=1e-4, atol=1e-6)


def test_an_operator_that_neither_engine_knows(tmp_path: Path) -> None:
    chain = make(lambda chain: chain.then("Tanh", [chain.current], torch.tanh), (3,))
    assert generate(chain, tmp_path) is None
    path = tmp_path / "training_model.onnx"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "Tanh")
    node.op_type, node.domain = "Unheard", "my.domain"
    model.opset_import.append(onnx.helper.make_opsetid("my.domain", 1))
    onnx.save(model, path)
    with pytest.raises(toc.CheckpointError, match=r"neither engine.*ort:.*Unheard.*torch:.*Unheard"):
        toc.OrtModule(tmp_path)


def test_eval_graphs_are_looked_at_too(tmp_path: Path) -> None:
    """Artifacts for evaluation only."""
    chain = make(average(2, kernel=2, pad=0, ceil=1), (4, 5, 7))
    assert generate(chain, tmp_path) is None
    (tmp_path / "training_model.onnx").unlink()
    with pytest.raises(toc.CheckpointError, match="AveragePool"):
        toc.OrtModule(tmp_path, engine="ort").eval().requires_grad_(False)(chain.batch(2)["x"])
    assert toc.OrtModule(tmp_path).engine.name == "torch"


def test_artifacts_by_ort_s_own_tools_are_repaired_when_they_are_run(tmp_path: Path) -> None:
    family = FAMILIES["conv1d"]
    native = nn.Sequential(nn.Conv1d(6, 12, 3, groups=3), nn.ReLU(), nn.Conv1d(12, 6, 1, groups=6), nn.Flatten(), nn.Linear(42, 5))
    changed = type(family)(lambda: copy.deepcopy(native), family.inputs, target=family.target)
    export_by_ort(changed, tmp_path)
    assert any(node.op_type == "ConvGrad" for node in onnx.load(tmp_path / "training_model.onnx").graph.node)
    model, (x, labels) = toc.OrtModule(tmp_path, engine="ort"), family.batch(3)
    model(x, labels).backward()
    F.cross_entropy(native(x), labels).backward()
    for key, value in native.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, value.grad, rtol=1e-4, atol=1e-6)

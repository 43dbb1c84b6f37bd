"""More layers for `Chain`: those that move elements, reductions, recurrent layers and losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .chains import CLASSES, Chain, Choices
from .layers import axis_of, images, layer


@layer
def reshape(chain: Chain, choices: Choices) -> None:
    size = math.prod(chain.shape[1:])
    parts = choices.of([count for count in range(1, 7) if size % count == 0])
    if choices.flag():
        chain.reshape(parts, size // parts)
    elif choices.flag():
        kept = chain.shape[1]
        chain.then("Reshape", [chain.current, chain.constant([0, 0, -1])], lambda x: x.reshape(-1, kept, size // kept))
    else:
        chain.then("Flatten", [chain.current], lambda x: x.flatten(1), axis=1)


@layer
def transpose(chain: Chain, choices: Choices) -> None:
    axes = list(range(1, len(chain.shape)))
    order = [0]
    while axes:
        order.append(axes.pop(choices.pick(len(axes))))
    chain.then("Transpose", [chain.current], lambda x: x.permute(order), perm=order)


@layer
def batch_last(chain: Chain, choices: Choices) -> None:
    """A layer that works on another axis than the batch's, between two transpositions."""
    order = [*range(1, len(chain.shape)), 0]
    back = [len(order) - 1, *range(len(order) - 1)]
    (turned,) = chain.add("Transpose", [chain.current], lambda x: x.permute(order), perm=order)
    (moved,) = chain.add("MatMul", [chain.weight(chain.shape[-1], chain.shape[-1]), turned], torch.matmul) if len(order) == 2 else [turned]
    (scaled,) = chain.add("Mul", [moved, chain.weight(chain.shape[1], *[1] * (len(order) - 1), scale=1.0)], torch.mul)
    chain.then("Transpose", [scaled], lambda x: x.permute(back), perm=back)


@layer
def squeeze(chain: Chain, choices: Choices) -> None:
    axis = 1 + choices.pick(len(chain.shape))
    if choices.flag() and len(chain.shape) < 5:
        chain.then("Unsqueeze", [chain.current, chain.constant([axis])], lambda x: x.unsqueeze(axis))
        return
    ones = [place for place, size in enumerate(chain.shape) if size == 1 and place]
    if ones and len(chain.shape) > 2:
        place = choices.of(ones)
        chain.then("Squeeze", [chain.current, chain.constant([place - len(chain.shape)])], lambda x: x.squeeze(place))


@layer
def slices(chain: Chain, choices: Choices) -> None:
    axis = axis_of(chain, choices)
    size = chain.shape[axis]
    start, step = choices.pick(size), choices.of((1, 2, 3, -1, -2))
    end = choices.of((2**63 - 1, size)) if step > 0 else choices.of((-(2**63) + 1, -size - 1))
    places = torch.arange(start, size)[::step] if step > 0 else torch.arange(start, -1, step)
    values = [chain.constant([value]) for value in (start, end, axis, step)]
    chain.then("Slice", [chain.current, *values], lambda x: x.index_select(axis, places))


@layer
def split(chain: Chain, choices: Choices) -> None:
    """Into uneven parts, joined again in another order, some of them changed or left out."""
    axis = axis_of(chain, choices)
    size = chain.shape[axis]
    sizes: list[int] = []
    left = size
    while left and len(sizes) < 3:
        sizes.append(left if len(sizes) == 2 else 1 + choices.pick(left))
        left -= sizes[-1]
    parts = chain.add("Split", [chain.current, chain.constant(sizes)], lambda x: torch.split(x, sizes, axis), outputs=len(sizes), axis=axis)
    (parts[0],) = chain.add("Tanh", [parts[0]], torch.tanh)
    joined = parts[::-1] if choices.flag() else parts
    if choices.flag() and len(joined) > 1:
        joined = joined[1:]
    if choices.flag():
        joined = [*joined, joined[0]]
    chain.then("Concat", joined, lambda *values: torch.cat(values, axis), axis=axis)


@layer
def concat_weight(chain: Chain, choices: Choices) -> None:
    """A weight repeated for every sample, before the rest: how class tokens are made."""
    if len(chain.shape) != 3:
        chain.into(3, 4)
    width = chain.shape[2]
    token = chain.weight(1, choices.of((1, 2)), width, scale=1.0)
    (shape,) = chain.add("Shape", [chain.current], lambda x: torch.tensor(x.shape))
    (size,) = chain.add("Slice", [shape, chain.constant([0]), chain.constant([1]), chain.constant([0])], lambda s: s[:1])
    rows = chain.example[token].shape[1]
    (whole,) = chain.add("Concat", [size, chain.constant([rows, width])], lambda s: torch.cat([s, torch.tensor([rows, width])]), axis=0)
    (repeated,) = chain.add("Expand", [token, whole], lambda t, s: t.expand(*s.tolist()))
    chain.then("Concat", [repeated, chain.current], lambda a, b: torch.cat([a, b], 1), axis=1)


@layer
def expand(chain: Chain, choices: Choices) -> None:
    shape = chain.shape
    if choices.flag():
        repeats = [1, *(1 + choices.pick(2) for _ in shape[1:])]
        chain.then("Tile", [chain.current, chain.constant(repeats)], lambda x: x.tile(repeats))
    else:
        sizes = [3 if size == 1 and choices.flag() else size for size in shape[1:]]
        chain.then("Expand", [chain.current, chain.constant([1, *sizes])], lambda x: x.expand(-1, *sizes))


@layer
def pad(chain: Chain, choices: Choices) -> None:
    rank = len(chain.shape)
    before, after = ([0, *(choices.pick(3) for _ in range(rank - 1))] for _ in range(2))
    value = choices.of((0.0, 1.5))
    amounts = [amount for pair in reversed(list(zip(before, after, strict=True))) for amount in pair]
    inputs = [chain.current, chain.constant(before + after), chain.constant(value, np.float32)]
    chain.then("Pad", inputs, lambda x: F.pad(x, amounts, value=value), mode="constant")


@layer
def gather(chain: Chain, choices: Choices) -> None:
    axis = axis_of(chain, choices)
    size = chain.shape[axis]
    if choices.flag() and len(chain.shape) > 2:
        place = choices.pick(2 * size) - size
        chain.then("Gather", [chain.current, chain.constant(place)], lambda x: x.select(axis, place % size), axis=axis)
        return
    places = [choices.pick(2 * size) - size for _ in range(1 + choices.pick(4))]
    wanted = torch.tensor(places) % size
    shape = choices.of(((len(places),), (1, len(places))))
    if len(shape) == 2 and len(chain.shape) > 4:
        shape = (len(places),)

    def function(x: Tensor) -> Tensor:
        found = x.index_select(axis, wanted)
        return found if len(shape) == 1 else found.unsqueeze(axis if axis >= 0 else axis + len(chain_shape))

    chain_shape = chain.shape
    chain.then("Gather", [chain.current, chain.constant(np.array(places).reshape(shape))], function, axis=axis)


@layer
def gather_elements(chain: Chain, choices: Choices) -> None:
    """Indices are computed from the value: sorted places, as TopK gives them."""
    axis = axis_of(chain, choices)
    size = chain.shape[axis]
    count = 1 + choices.pick(size)
    largest = choices.pick(2)

    def top(x: Tensor) -> Any:
        return tuple(torch.topk(x, count, axis, bool(largest)))

    values, places = chain.add("TopK", [chain.current, chain.constant([count])], top, outputs=2, axis=axis, largest=largest)
    if choices.flag():
        chain.go_on(values)
    else:
        (changed,) = chain.add("Sin", [chain.current], torch.sin)
        chain.then("GatherElements", [changed, places], lambda x, i: x.gather(axis, i), axis=axis)


@layer
def gather_nd(chain: Chain, choices: Choices) -> None:
    """Chosen elements of each sample (`batch_dims=1` wants indices of the same batch)."""
    if len(chain.shape) != 3:
        chain.into(3, 4)
    rows, width = chain.shape[1:]
    order = [2, 1, 0] if choices.flag() else [1, 0, 2]
    (turned,) = chain.add("Transpose", [chain.current], lambda x: x.permute(order), perm=order)
    first = width if order[0] == 2 else rows
    places = [[choices.pick(first)] for _ in range(1 + choices.pick(3))]
    wanted = [place[0] for place in places]
    (found,) = chain.add("GatherND", [turned, chain.constant(places)], lambda x: x[wanted])
    chain.then("Transpose", [found], lambda x: x.permute(order), perm=order) if order == [1, 0, 2] else chain.then(
        "Transpose", [found], lambda x: x.permute(2, 1, 0), perm=[2, 1, 0]
    )


@layer
def scatter(chain: Chain, choices: Choices) -> None:
    """Writes weights over some places of a table that is then added to the value."""
    if len(chain.shape) != 3:
        chain.into(3, 4)
    rows, width = chain.shape[1:]
    table, places = chain.weight(rows, width, scale=1.0), [[choices.pick(rows)]]
    if choices.flag():
        update = chain.weight(1, width, scale=1.0)
        place = places[0][0]
        (written,) = chain.add("ScatterND", [table, chain.constant(places), update], lambda t, u: t.index_put((torch.tensor([place]),), u))
    else:
        indices = torch.tensor([[choices.pick(rows) for _ in range(width)]])
        update = chain.weight(1, width, scale=1.0)
        (written,) = chain.add(
            "ScatterElements", [table, chain.constant(indices.numpy()), update], lambda t, u: t.scatter(0, indices, u), axis=0
        )
    chain.then("Add", [chain.current, written], torch.add)


@layer
def triangle(chain: Chain, choices: Choices) -> None:
    if len(chain.shape) < 3:
        chain.into(3, 4)
    upper, diagonal = choices.pick(2), choices.pick(3) - 1
    function = torch.triu if upper else torch.tril
    if chain.opset < 18:
        return
    chain.then("Trilu", [chain.current, chain.constant(diagonal)], lambda x: function(x, diagonal), upper=upper)


@layer
def reduction(chain: Chain, choices: Choices) -> None:
    if len(chain.shape) < 3:
        chain.into(3, 4)
    kind = choices.of(("ReduceMean", "ReduceSum", "ReduceL2", "ReduceLogSumExp"))
    axes = sorted({axis_of(chain, choices) % len(chain.shape) for _ in range(1 + choices.pick(2))})
    keep = choices.pick(2) if len(axes) < len(chain.shape) - 1 else 1
    functions: dict[str, Any] = {
        "ReduceMean": lambda x: x.mean(axes, keepdim=bool(keep)),
        "ReduceSum": lambda x: x.sum(axes, keepdim=bool(keep)),
        "ReduceL2": lambda x: x.norm(2, axes, keepdim=bool(keep)),
        "ReduceLogSumExp": lambda x: x.logsumexp(axes, keepdim=bool(keep)),
    }
    given = [axis - len(chain.shape) for axis in axes] if choices.flag() else axes
    if kind == "ReduceSum" or chain.opset >= 18:
        chain.then(kind, [chain.current, chain.constant(given)], functions[kind], keepdims=keep)
    else:
        chain.then(kind, [chain.current], functions[kind], keepdims=keep, axes=given)


@layer
def mean_of_the_batch(chain: Chain, choices: Choices) -> None:
    """Subtracts the batch's mean, which couples the samples."""
    if chain.opset >= 18:
        (mean,) = chain.add("ReduceMean", [chain.current, chain.constant([0])], lambda x: x.mean(0, keepdim=True), keepdims=1)
    else:
        (mean,) = chain.add("ReduceMean", [chain.current], lambda x: x.mean(0, keepdim=True), keepdims=1, axes=[0])
    chain.then("Sub", [chain.current, mean], torch.sub)


@layer
def resize(chain: Chain, choices: Choices) -> None:
    images(chain, choices, 2)
    scales = chain.constant([1.0, 1.0, 2.0, 2.0], np.float32)
    mode, name = choices.of((("nearest", "nearest"), ("linear", "bilinear")))
    settings = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"} if mode == "nearest" else {}
    chain.then("Resize", [chain.current, "", scales], lambda x: F.interpolate(x, scale_factor=2, mode=name), mode=mode, **settings)


@layer
def lstm(chain: Chain, choices: Choices) -> None:
    _recurrent(chain, choices, "LSTM", 4)


@layer
def gru(chain: Chain, choices: Choices) -> None:
    _recurrent(chain, choices, "GRU", 3)


def _recurrent(chain: Chain, choices: Choices, kind: str, gates: int) -> None:
    """Over samples of [steps, features]; ONNX has the steps first and an axis for the directions."""
    if len(chain.shape) != 3:
        chain.into(choices.of((3, 1, 4)), choices.of((4, 1, 3)))
    steps, features = chain.shape[1:]
    size = choices.of((4, 1, 3))
    direction = choices.of(("forward", "forward", "forward", "reverse"))
    reset = choices.pick(2) if kind == "GRU" else 0
    (bounded,) = chain.add("Tanh", [chain.current], torch.tanh)  # gates that are all open or shut have no gradient but rounding
    (turned,) = chain.add("Transpose", [bounded], lambda x: x.transpose(0, 1), perm=[1, 0, 2])
    inputs = [turned, chain.weight(1, gates * size, features, scale=0.5), chain.weight(1, gates * size, size, scale=0.5)]
    inputs += [chain.weight(1, 2 * gates * size, scale=0.5) if choices.flag() else "", ""]
    # ORT's gradient wants the first state to be there, as exporters write it: a weight or zeros, repeated for every sample.
    (shape,) = chain.add("Shape", [turned], lambda x: torch.tensor(x.shape))
    (count,) = chain.add("Slice", [shape, chain.constant([1]), chain.constant([2]), chain.constant([0])], lambda s: s[1:2])
    parts = [chain.constant([1]), count, chain.constant([size])]
    (whole,) = chain.add("Concat", parts, lambda s: torch.cat([torch.tensor([1]), s, torch.tensor([size])]), axis=0)
    for _ in range(2 if kind == "LSTM" else 1):
        inputs += chain.add("Expand", [chain.weight(1, 1, size, scale=0.5), whole], lambda t, s: t.expand(*s.tolist()))
    biased = bool(inputs[3])
    cell = _lstm_cell if kind == "LSTM" else _gru_cell

    def function(x: Tensor, w: Tensor, r: Tensor, *rest: Tensor) -> Any:
        bias = rest[0][0] if biased else x.new_zeros(2 * gates * size)
        state: Any = tuple(value[0] for value in rest[biased:])
        found: list[Tensor] = []
        for step in range(steps) if direction == "forward" else reversed(range(steps)):
            state = cell(x[step], state, w[0], r[0], bias.chunk(2), bool(reset))
            found.append(state[0])
        last = state[0][None]
        found = found if direction == "forward" else found[::-1]
        return [torch.stack(found)[:, None], last, *([state[1][None]] if kind == "LSTM" else [])]

    settings: dict[str, Any] = {"hidden_size": size, "direction": direction} | ({"linear_before_reset": reset} if kind == "GRU" else {})
    outputs = chain.add(kind, inputs, function, outputs=3 if kind == "LSTM" else 2, **settings)
    if choices.flag():
        (one,) = chain.add("Squeeze", [outputs[0], chain.constant([1])], lambda y: y.squeeze(1))
        chain.then("Transpose", [one], lambda y: y.transpose(0, 1), perm=[1, 0, 2])
    else:
        chain.then("Transpose", [outputs[1 + (choices.pick(2) if kind == "LSTM" else 0)]], lambda y: y.transpose(0, 1), perm=[1, 0, 2])


def _lstm_cell(x: Tensor, state: Any, w: Tensor, r: Tensor, biases: Any, reset: bool) -> Any:
    hidden, memory = state
    i, o, f, c = (x @ w.T + hidden @ r.T + biases[0] + biases[1]).chunk(4, 1)
    memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(c)
    return torch.sigmoid(o) * torch.tanh(memory), memory


def _gru_cell(x: Tensor, state: Any, w: Tensor, r: Tensor, biases: Any, reset: bool) -> Any:
    hidden, (wb, rb) = state[0], biases
    (xz, xr, xh), (rz, rr, rh), (bz, br, bh) = (x @ w.T + wb).chunk(3, 1), r.chunk(3), rb.chunk(3)
    z, gate = torch.sigmoid(xz + hidden @ rz.T + bz), torch.sigmoid(xr + hidden @ rr.T + br)
    inner = gate * (hidden @ rh.T + bh) if reset else (gate * hidden) @ rh.T + bh
    new = (1 - z) * torch.tanh(xh + inner) + z * hidden
    return (new,)


@layer
def cross_entropy(chain: Chain, choices: Choices) -> None:
    """The loss: nothing can follow it."""
    chain.into(CLASSES)
    reduction = choices.of(("mean", "sum", "none"))
    ignored = choices.of((None, 2))
    inputs = [chain.current, "labels"]
    weights: Tensor | None = None
    if choices.flag():
        weights = chain.random(CLASSES).abs() + 0.5
        inputs.append(chain.constant(weights.numpy(), np.float32))

    def function(x: Tensor, labels: Tensor) -> Tensor:
        given = {} if ignored is None else {"ignore_index": ignored}
        return F.cross_entropy(x, labels, weights if weights is None else weights.to(x.dtype), reduction=reduction, **given)

    given = {} if ignored is None else {"ignore_index": ignored}
    chain.then("SoftmaxCrossEntropyLoss", inputs, function, outputs=2, keep=1, reduction=reduction, **given)
    if reduction == "none":
        chain.then("ReduceSum", [chain.current], lambda x: x.sum(), keepdims=0)
    chain.loss = chain.current

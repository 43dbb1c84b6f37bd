"""LSTM, GRU and RNN: torch's own kernels where they compute the same, else step by step (as `torch.compile` and `torch.export` want it).

ONNX stacks the gates as i o f c (LSTM) and z r h (GRU), torch as i f g o and r z n; the weights are reordered on the way in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .registry import register_op

_LSTM_ORDER = (0, 2, 3, 1)
_GRU_ORDER = (1, 0, 2)


@register_op("LSTM")
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    outputs: int = 1,
) -> Any:
    x = x.transpose(0, 1) if layout else x
    count, hidden = w.shape[0], r.shape[-1]
    h0 = _initial(initial_h, x, count, hidden, layout)
    c0 = _initial(initial_c, x, count, hidden, layout)
    plain = activations is None or list(activations) == ["Sigmoid", "Tanh", "Tanh"] * count
    if plain and sequence_lens is None and p is None and clip is None and not input_forget and not torch.compiler.is_compiling():
        x = x.flip(0) if direction == "reverse" else x
        y, h, c = torch.lstm(x, (h0, c0), _torch_weights(w, r, b, _LSTM_ORDER), b is not None, 1, 0.0, True, count == 2, False)
        y = y.flip(0) if direction == "reverse" else y
        y = y.reshape(*y.shape[:2], count, hidden).transpose(1, 2)
    else:
        names = activations or ["Sigmoid", "Tanh", "Tanh"] * count
        ys: list[Tensor] = []
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        for k in range(count):
            functions = _functions(names[3 * k : 3 * k + 3], activation_alpha, activation_beta)
            peephole = p[k].chunk(3) if p is not None else None

            def step(gates: Tensor, state: Any, peephole: Any = peephole, functions: Any = functions, k: int = k) -> Any:
                return _lstm_step(gates, state, r[k], peephole, functions, clip, input_forget)

            inner = x @ w[k].t() + (sum(b[k].chunk(2)) if b is not None else 0.0)
            yk, (hk, ck) = _run(step, inner, (h0[k], c0[k]), sequence_lens, direction == "reverse" or k == 1)
            ys, hs, cs = [*ys, yk], [*hs, hk], [*cs, ck]
        y, h, c = torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)
    return _results(y, (h, c), layout, outputs)


@register_op("GRU")
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    outputs: int = 1,
) -> Any:
    x = x.transpose(0, 1) if layout else x
    count, hidden = w.shape[0], r.shape[-1]
    h0 = _initial(initial_h, x, count, hidden, layout)
    plain = activations is None or list(activations) == ["Sigmoid", "Tanh"] * count
    if plain and sequence_lens is None and clip is None and linear_before_reset and not torch.compiler.is_compiling():
        x = x.flip(0) if direction == "reverse" else x
        y, h = torch.gru(x, h0, _torch_weights(w, r, b, _GRU_ORDER), b is not None, 1, 0.0, True, count == 2, False)
        y = y.flip(0) if direction == "reverse" else y
        y = y.reshape(*y.shape[:2], count, hidden).transpose(1, 2)
    else:
        names = activations or ["Sigmoid", "Tanh"] * count
        ys: list[Tensor] = []
        hs: list[Tensor] = []
        for k in range(count):
            functions = _functions(names[2 * k : 2 * k + 2], activation_alpha, activation_beta)
            wb, rb = b[k].chunk(2) if b is not None else (x.new_zeros(3 * hidden),) * 2

            def step(gates: Tensor, state: Any, rb: Tensor = rb, functions: Any = functions, k: int = k) -> Any:
                return _gru_step(gates, state, r[k], rb, functions, clip, linear_before_reset)

            yk, (hk,) = _run(step, x @ w[k].t() + wb, (h0[k],), sequence_lens, direction == "reverse" or k == 1)
            ys, hs = [*ys, yk], [*hs, hk]
        y, h = torch.stack(ys, 1), torch.stack(hs)
    return _results(y, (h,), layout, outputs)


@register_op("RNN")
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    outputs: int = 1,
) -> Any:
    x = x.transpose(0, 1) if layout else x
    count, hidden = w.shape[0], r.shape[-1]
    h0 = _initial(initial_h, x, count, hidden, layout)
    names = activations or ["Tanh"] * count
    ys: list[Tensor] = []
    hs: list[Tensor] = []
    for k in range(count):
        (function,) = _functions(names[k : k + 1], activation_alpha, activation_beta)

        def step(gates: Tensor, state: Any, function: Any = function, k: int = k) -> Any:
            h = function(_clip(gates + state[0] @ r[k].t(), clip))
            return h, (h,)

        inner = x @ w[k].t() + (sum(b[k].chunk(2)) if b is not None else 0.0)
        yk, (hk,) = _run(step, inner, (h0[k],), sequence_lens, direction == "reverse" or k == 1)
        ys, hs = [*ys, yk], [*hs, hk]
    return _results(torch.stack(ys, 1), (torch.stack(hs),), layout, outputs)


def _lstm_step(gates: Tensor, state: Any, r: Tensor, peephole: Any, functions: Any, clip: float | None, input_forget: int) -> Any:
    h, c = state
    f, g, out = functions
    i_gate, o_gate, f_gate, c_gate = (gates + h @ r.t()).chunk(4, -1)
    if peephole is not None:
        i_gate, f_gate = i_gate + peephole[0] * c, f_gate + peephole[2] * c
    i_value = f(_clip(i_gate, clip))
    f_value = 1 - i_value if input_forget else f(_clip(f_gate, clip))
    c = f_value * c + i_value * g(_clip(c_gate, clip))
    if peephole is not None:
        o_gate = o_gate + peephole[1] * c
    h = f(_clip(o_gate, clip)) * out(c)
    return h, (h, c)


def _gru_step(gates: Tensor, state: Any, r: Tensor, rb: Tensor, functions: Any, clip: float | None, linear_before_reset: int) -> Any:
    (h,) = state
    f, g = functions
    z_gate, r_gate, h_gate = gates.chunk(3, -1)
    rz, rr, rh = r.chunk(3)
    bz, br, bh = rb.chunk(3)
    z = f(_clip(z_gate + h @ rz.t() + bz, clip))
    reset = f(_clip(r_gate + h @ rr.t() + br, clip))
    inner = reset * (h @ rh.t() + bh) if linear_before_reset else (reset * h) @ rh.t() + bh
    h = (1 - z) * g(_clip(h_gate + inner, clip)) + z * h
    return h, (h,)


def _run(step: Callable[[Tensor, Any], Any], inner: Tensor, state: Any, lengths: Tensor | None, backwards: bool) -> Any:
    """Step through time. Beyond a sequence's length the output is zero and the state stays; backwards starts at its last element."""
    places = range(inner.shape[0] - 1, -1, -1) if backwards else range(inner.shape[0])
    ys: list[Tensor] = []
    for t in places:
        y, fresh = step(inner[t], state)
        if lengths is not None:
            alive = (t < lengths).unsqueeze(-1)
            y = torch.where(alive, y, torch.zeros_like(y))
            fresh = tuple(torch.where(alive, new, old) for new, old in zip(fresh, state, strict=True))
        state = fresh
        ys.append(y)
    return torch.stack(ys[::-1] if backwards else ys), state


def _torch_weights(w: Tensor, r: Tensor, b: Tensor | None, order: tuple[int, ...]) -> list[Tensor]:
    """Per direction: input weights, recurrent weights and the two biases, gates in torch's order."""
    weights = []
    for k in range(w.shape[0]):
        parts = [w[k], r[k], *(b[k].chunk(2) if b is not None else ())]
        for part in parts:
            gates = part.chunk(len(order))
            weights.append(torch.cat([gates[i] for i in order]))
    return weights


def _initial(state: Tensor | None, x: Tensor, count: int, hidden: int, layout: int) -> Tensor:
    if state is None:
        return x.new_zeros(count, x.shape[1], hidden)
    return state.transpose(0, 1) if layout else state


def _results(y: Tensor, states: tuple[Tensor, ...], layout: int, outputs: int) -> Any:
    if layout:
        y, states = y.permute(2, 0, 1, 3), tuple(state.transpose(0, 1) for state in states)
    return y if outputs == 1 else (y, *states)[:outputs]


def _clip(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _functions(names: Any, alphas: Any, betas: Any) -> list[Callable[[Tensor], Tensor]]:
    return [_function(name, (alphas or [None] * 9)[i], (betas or [None] * 9)[i]) for i, name in enumerate(names)]


def _function(name: str, alpha: float | None, beta: float | None) -> Callable[[Tensor], Tensor]:
    def or_else(value: float | None, default: float) -> float:
        return default if value is None else value

    table: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softsign": torch.nn.functional.softsign,
        "softplus": torch.nn.functional.softplus,
        "affine": lambda x: x * or_else(alpha, 1.0) + or_else(beta, 0.0),
        "leakyrelu": lambda x: torch.nn.functional.leaky_relu(x, or_else(alpha, 0.01)),
        "thresholdedrelu": lambda x: torch.nn.functional.threshold(x, or_else(alpha, 1.0), 0.0),
        "scaledtanh": lambda x: or_else(alpha, 1.0) * torch.tanh(or_else(beta, 1.0) * x),
        "hardsigmoid": lambda x: torch.clamp(x * or_else(alpha, 0.2) + or_else(beta, 0.5), 0.0, 1.0),
        "elu": lambda x: torch.nn.functional.elu(x, or_else(alpha, 1.0)),
    }
    return table[name.lower()]

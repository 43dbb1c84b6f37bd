"""The com.microsoft operators that ORT's training graphs and graph optimiser put into the forward part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops_attention import rotate, split_heads
from .ops_nn import conv, dropout, layer_norm, rms_norm
from .ops_rnn import gru, lstm
from .registry import MICROSOFT, Scalar, register_op


@register_op("BatchNormInternal", domain=MICROSOFT)
def batch_norm_internal(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
    outputs: int = 1,
) -> Any:
    """BatchNorm of a training graph: the running statistics are updated in place, with the unbiased variance, as torch does."""
    scale, bias = scale.to(mean.dtype), bias.to(mean.dtype)  # x may be in half precision, and the rest in float32
    y = F.batch_norm(x, mean, var, scale, bias, bool(training_mode), 1 - momentum, epsilon)
    return y if outputs == 1 else (y, mean, var)[:outputs]


@register_op("InPlaceAccumulatorV2", domain=MICROSOFT)
def write_in_place(buffer: Tensor, value: Tensor, overwrite: Tensor) -> Tensor:
    """A buffer's new value, written over the old one; the result only says that it is done."""
    with torch.no_grad():
        new = torch.where(overwrite, value.detach(), buffer + value.detach())
        buffer.copy_(new.reshape(buffer.shape))  # the flag has one axis, a counter none
    return torch.ones(1, dtype=torch.bool, device=buffer.device)


@register_op("ConcatTraining", domain=MICROSOFT)
def concat_training(*values: Tensor, axis: int, outputs: int = 1) -> Any:
    """The second output is the size of each part along the axis."""
    whole = torch.cat(values, axis)
    return whole if outputs == 1 else (whole, torch.tensor([value.shape[axis] for value in values], device=whole.device))


@register_op("SplitTraining", domain=MICROSOFT)
def split_training(x: Tensor, sizes: Tensor, *, axis: int = 0, outputs: int = 1) -> Any:
    parts = torch.split(x, sizes.tolist(), axis)
    return parts[0] if outputs == 1 else parts


@register_op("LSTMTraining", domain=MICROSOFT)
def lstm_training(*values: Any, outputs: int = 1, **attributes: Any) -> Any:
    """LSTM, with more outputs that only its gradient reads."""
    return lstm(*values, outputs=outputs, **attributes)


@register_op("GRUTraining", domain=MICROSOFT)
def gru_training(*values: Any, outputs: int = 1, **attributes: Any) -> Any:
    return gru(*values, outputs=outputs, **attributes)


@register_op("Gelu", domain=MICROSOFT)
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@register_op("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@register_op("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@register_op("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@register_op("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(x: Tensor, bias: Tensor, *, axis: int = 1, is_inner_broadcast: int) -> Tensor:
    """Softmax over everything from `axis` on."""
    if not is_inner_broadcast and bias.dim() == x.dim():
        bias = bias.repeat([full // part if full % part == 0 and part > 1 else 1 for full, part in zip(x.shape, bias.shape, strict=True)])
    axis = axis if axis >= 0 else axis + x.dim()
    return torch.softmax((x + bias).flatten(axis), -1).reshape(x.shape)


@register_op("BiasDropout", domain=MICROSOFT)
@register_op("BitmaskBiasDropout", domain=MICROSOFT)
def bias_dropout(
    x: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    ratio: Scalar | None = None,
    training_mode: Scalar | None = None,
    *,
    seed: int = 0,
    outputs: int = 1,
) -> Any:
    kept = dropout(x + bias, ratio, training_mode, seed=seed, outputs=outputs)
    if residual is None:
        return kept
    return kept + residual if outputs == 1 else (kept[0] + residual, kept[1])


@register_op("BitmaskDropout", domain=MICROSOFT)
def bitmask_dropout(x: Tensor, ratio: Scalar | None = None, training_mode: Scalar | None = None, *, seed: int = 0, outputs: int = 1) -> Any:
    """Dropout with a packed mask, which only its gradient reads."""
    return dropout(x, ratio, training_mode, seed=seed, outputs=outputs)


@register_op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    outputs: int = 1,
) -> Any:
    """The outputs are the normalised sum, its mean and inverse deviation, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    if outputs == 1:
        return layer_norm(total, gamma, beta, epsilon=epsilon)
    return (*layer_norm(total, gamma, beta, epsilon=epsilon, outputs=3), total)[:outputs]


@register_op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12, outputs: int = 1
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    y = rms_norm(total, gamma, epsilon=epsilon)
    return y if outputs == 1 else (y, None, None, total)[:outputs]


@register_op("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int = 1
) -> Any:
    return rms_norm(x, scale, axis=axis, epsilon=epsilon, outputs=outputs)


@register_op("LayerNormalization", domain=MICROSOFT)
def layer_normalization(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int = 1
) -> Any:
    return layer_norm(x, scale, bias, axis=axis, epsilon=epsilon, outputs=outputs)


@register_op("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    outputs: int = 1,
) -> Any:
    places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
    total = F.embedding(ids, words) + F.embedding(places, positions)
    if segments is not None and segment_table is not None:
        total = total + F.embedding(segments, segment_table)
    y = F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
    if outputs == 1:
        return y
    counts = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device) if mask is None else mask.sum(1).to(torch.int32)
    return (y, counts, total)[:outputs]


@register_op("FusedMatMul", domain=MICROSOFT)
@register_op("TransposeMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
) -> Tensor:
    """`transBatch*`: the matrix's rows are the first axis, before the batch axes."""
    a = a.movedim(0, -2) if transBatchA else a
    b = b.movedim(0, -2) if transBatchB else b
    product = torch.matmul(a.transpose(-1, -2) if transA else a, b.transpose(-1, -2) if transB else b)
    return product if alpha == 1.0 else alpha * product


@register_op("FusedConv", domain=MICROSOFT)
def fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Any = (),
    **attributes: Any,
) -> Tensor:
    y = conv(x, w, b, **attributes)
    y = y if z is None else y + z
    functions: dict[str, Any] = {
        "": lambda v: v,
        "Relu": torch.relu,
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "LeakyRelu": lambda v: F.leaky_relu(v, activation_params[0]),
        "Clip": lambda v: torch.clamp(v, *activation_params),
        "HardSigmoid": lambda v: torch.clamp(v * activation_params[0] + activation_params[1], 0.0, 1.0),
    }
    result: Tensor = functions[activation](y)
    return result


@register_op("Scale", domain=MICROSOFT)
def scale_down(x: Tensor, scale: Scalar, *, scale_down: int = 0) -> Tensor:
    result: Tensor = x / scale if scale_down else x * scale
    return result


@register_op("BiasAdd", domain=MICROSOFT)
def bias_add(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    return x + bias + skip


@register_op("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    kept, gate = (x + bias).chunk(2, -1)
    return kept * F.gelu(gate)


@register_op("Inverse", domain=MICROSOFT)
def inverse(x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.inv(x)
    return result


@register_op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """One position id is where every sequence starts."""
    size = rotary_embedding_dim or 2 * cos_cache.shape[-1]
    heads = x.transpose(1, 2) if x.dim() == 4 else x.reshape(*x.shape[:2], num_heads or -1, x.shape[-1] // num_heads if num_heads else size)
    if position_ids.numel() == 1:
        position_ids = position_ids.reshape(1, 1) + torch.arange(heads.shape[1], device=x.device)
    turned = rotate(heads, cos_cache[position_ids].unsqueeze(2), sin_cache[position_ids].unsqueeze(2), size, bool(interleaved))
    return turned.transpose(1, 2) if x.dim() == 4 else turned.reshape(x.shape)


@register_op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    scores_bias: Tensor | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> Tensor:
    """Separate [batch, sequence, hidden] inputs; `padding_mask` [batch, keys] is 1 where a key counts."""
    k, v = q if k is None else k, q if v is None else v
    if bias is not None:
        bq, bk, bv = torch.split(bias, [q.shape[-1], k.shape[-1], v.shape[-1]])
        q, k, v = q + bq, k + bk, v + bv
    extra = scores_bias
    if padding_mask is not None:
        hidden = (1.0 - padding_mask.to(q.dtype))[:, None, None, :] * mask_filter_value
        extra = hidden if extra is None else extra + hidden
    if unidirectional:
        ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        causal = torch.zeros(ahead.shape, dtype=q.dtype, device=q.device).masked_fill(ahead, mask_filter_value)
        extra = causal if extra is None else extra + causal
    q, k, v = split_heads(q, num_heads), split_heads(k, num_heads), split_heads(v, num_heads)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=extra, scale=scale or None)
    return y.transpose(1, 2).flatten(2)


@register_op("Attention", domain=MICROSOFT)
def attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    scores_bias: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    qkv_hidden_sizes: Any = None,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> Tensor:
    """Self-attention with the three projections in one matrix."""
    projected = x @ weights if bias is None else x @ weights + bias
    q, k, v = torch.split(projected, list(qkv_hidden_sizes), -1) if qkv_hidden_sizes else projected.chunk(3, -1)
    settings: dict[str, Any] = {
        "mask_filter_value": mask_filter_value,
        "num_heads": num_heads,
        "scale": scale,
        "unidirectional": unidirectional,
    }
    return multi_head_attention(q, k, v, None, mask, scores_bias, **settings)

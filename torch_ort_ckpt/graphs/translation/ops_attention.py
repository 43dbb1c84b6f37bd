"""Attention and rotary embeddings as ONNX (opset 23) has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import register_op


@register_op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """`x` is [batch, heads, sequence, size] or [batch, sequence, hidden]."""
    heads = x.reshape(*x.shape[:2], num_heads, -1) if x.dim() == 3 else x.transpose(1, 2)  # [batch, sequence, heads, size]
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    turned = rotate(heads, cos_cache.unsqueeze(2), sin_cache.unsqueeze(2), rotary_embedding_dim or heads.shape[-1], bool(interleaved))
    return turned.reshape(x.shape) if x.dim() == 3 else turned.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, size: int, interleaved: bool) -> Tensor:
    """Turn pairs of the first `size` elements: neighbours if `interleaved`, else one of each half."""
    part, rest = x[..., :size], x[..., size:]
    cos, sin = cos[..., : size // 2], sin[..., : size // 2]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


@register_op("Attention", since=23)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: torch.dtype | None = None,
    outputs: int = 1,
) -> Any:
    """Inputs [batch, heads, sequence, size] or [batch, sequence, hidden]; fewer key than query heads are shared among them."""
    flat = q.dim() == 3
    if flat:
        q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    if q.shape[1] != k.shape[1]:
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    bias = _mask_bias(mask, is_causal, q, k, 0 if past_key is None else past_key.shape[2])
    if outputs <= 3 and not softcap and softmax_precision is None:
        y, product = F.scaled_dot_product_attention(q, k, v, bias, scale=scale), None
    else:
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        capped = softcap * torch.tanh(scores / softcap) if softcap else scores
        final = capped if bias is None else capped + bias
        blind = final.isneginf().all(-1, keepdim=True)  # a query that may see nothing attends to nothing
        weights = torch.softmax(final.to(softmax_precision or final.dtype), -1).to(q.dtype).masked_fill(blind, 0.0)
        y, product = weights @ v, (scores, capped, final, weights)[qk_matmul_output_mode]
    y = y.transpose(1, 2).flatten(2) if flat else y
    return y if outputs == 1 else (y, *present, product)[:outputs]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, hidden] to [batch, heads, sequence, size]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _mask_bias(mask: Tensor | None, is_causal: int, q: Tensor, k: Tensor, offset: int) -> Tensor | None:
    """What is added to the scores: the mask (booleans say what may be seen) and minus infinity beyond the diagonal."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=-torch.inf) if mask.shape[-1] < k.shape[2] else mask
    if is_causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(offset + 1)
        causal = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)
        mask = causal if mask is None else mask + causal
    return mask

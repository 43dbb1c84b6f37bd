"""EmbeddingBag: sums, means and maxima of rows of a table."""

from __future__ import annotations

import torch

from .registry import before

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2
Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@before(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Bags:
    """Looks every index up, then adds the rows of each bag. Autograd makes the backward of a gather and a sum.

    PyTorch's `offset2bag` and `bag_size` come out as well, and zeros for `max_indices`: nothing differentiable depends on it.
    """
    if scale_grad_by_freq:
        return NotImplemented  # PyTorch 2.13 divides by the frequency of another index on the CPU: there is nothing to agree with
    bags = offsets.shape[0]  # with the last offset, one more than there are: what comes after it is in no bag
    bag_of = _bag_of_each_index(indices, offsets)
    rows = torch.nn.functional.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    counted = torch.ones_like(indices) if padding_idx is None or padding_idx < -weight.shape[0] else (indices != padding_idx).long()
    sizes = torch.zeros([bags], dtype=torch.int64, device=weight.device).index_add(0, bag_of, counted.to(torch.int64))
    if mode == MAX:
        result = _largest(rows, bag_of, counted, bags)
    else:
        kept = rows * counted.to(rows.dtype).unsqueeze(1)
        result = torch.zeros([bags, weight.shape[1]], dtype=weight.dtype, device=weight.device).index_add(0, bag_of, kept)
        if mode == MEAN:
            result = result / torch.clamp(sizes, min=1).to(result.dtype).unsqueeze(1)
    if include_last_offset:
        result, sizes = result[:-1], sizes[:-1]
    return result, bag_of, sizes, torch.zeros_like(sizes)


def _bag_of_each_index(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Counts the bags that have begun: one is added where a bag begins. An empty last bag begins after the last index."""
    begun = torch.zeros([indices.shape[0] + 1], dtype=torch.int64, device=indices.device)
    begun = begun.index_add(0, offsets.to(torch.int64), torch.ones_like(offsets, dtype=torch.int64))
    return torch.cumsum(begun, 0)[: indices.shape[0]] - 1


def _largest(rows: torch.Tensor, bag_of: torch.Tensor, counted: torch.Tensor, bags: int) -> torch.Tensor:
    """The first largest element of each bag and column, and zero for an empty bag."""
    inside = (bag_of.unsqueeze(0) == torch.arange(bags, device=rows.device).unsqueeze(1)) & (counted.unsqueeze(0) > 0)  # [bags, indices]
    inside = inside.unsqueeze(2)
    largest = torch.where(inside, rows.unsqueeze(0), float("-inf")).max(1).values
    return torch.where(inside.any(1), largest, 0.0)

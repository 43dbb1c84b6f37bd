"""When two tensors are the same memory."""

from __future__ import annotations

import torch

from torch_ort_ckpt.storage.tensors import memory_key


def test_views_of_the_same_elements_are_the_same_memory() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    assert memory_key(value) == memory_key(value.detach()) == memory_key(value.view(2, 3)) == memory_key(torch.nn.Parameter(value))


def test_other_elements_shapes_and_types_are_not() -> None:
    value = torch.arange(4.0).reshape(2, 2)
    others = [value.clone(), value.T, value.flatten(), value[:1], value.view(torch.int32), value.to("meta")]
    assert len({memory_key(value), *map(memory_key, others)}) == 1 + len(others)


def test_tensors_without_memory_equal_only_themselves() -> None:
    for value, other in ((torch.empty(0), torch.empty(0)), (torch.empty(2, device="meta"), torch.empty(2, device="meta"))):
        assert memory_key(value) == memory_key(value)
        assert memory_key(value) != memory_key(other)

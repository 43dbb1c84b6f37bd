"""DLPack between PyTorch and ORT: every element type in both directions, shared memory, and unsupported tensors raise, never crash."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.engines.ort.dlpack import ALIASABLE, as_input, from_ort, to_ort

pytestmark = pytest.mark.ort


@pytest.mark.parametrize("dtype", sorted(ALIASABLE, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_both_sides_see_one_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    back = from_ort(to_ort(tensor), tensor.dtype is torch.bool)
    assert back.dtype == dtype
    assert back.shape == shape
    if tensor.numel():
        assert back.data_ptr() == tensor.data_ptr()
        tensor.fill_(1)
        assert bool((back == 1).all())


def test_a_view_with_an_offset_and_a_parameter() -> None:
    base = torch.arange(10.0)
    assert from_ort(to_ort(base[3:7])).tolist() == [3, 4, 5, 6]
    parameter = torch.nn.Parameter(torch.ones(2))
    assert from_ort(to_ort(parameter)).data_ptr() == parameter.data_ptr()


def test_the_memory_lives_as_long_as_ort_holds_it() -> None:
    tensor = torch.full((1000,), 7.0)
    storage = weakref.ref(tensor)
    value = to_ort(tensor)
    del tensor
    gc.collect()
    torch.full((1000,), 1.0)  # would take the freed memory
    assert from_ort(value).eq(7.0).all()
    assert storage() is None or storage().eq(7.0).all()


def test_what_can_not_be_lent_is_refused_or_copied_first() -> None:
    for odd in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float8_e4m3fn)):
        with pytest.raises(toc.CheckpointError, match="can't use"):
            to_ort(odd)
    grid = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(toc.CheckpointError, match="contiguous"):
        to_ort(grid.t())
    assert from_ort(to_ort(as_input(grid.t()))).tolist() == grid.t().tolist()
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag.contiguous()
    lazily = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    assert lazily.is_neg()
    assert from_ort(to_ort(as_input(lazily))).tolist() == [-1.0]
    assert from_ort(to_ort(negative)).tolist() == [-1.0, -1.0]

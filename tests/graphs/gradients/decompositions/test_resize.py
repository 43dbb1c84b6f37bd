"""Interpolation against autograd: as PyTorch traces it, and the backward of each mode by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort_ckpt.graphs.gradients.decompositions import after_autograd

from .agreement import check

aten = torch.ops.aten
MODES = [("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 1), ("nearest-exact", 2), ("nearest-exact", 3),
         ("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3), ("area", 2)]  # fmt: skip


@pytest.mark.parametrize(("mode", "axes"), MODES)
@pytest.mark.parametrize("how", [{"scale_factor": 2}, {"size": [7, 6, 5]}])
def test_interpolation_of_dynamic_size(mode, axes, how):
    how = {"size": how["size"][:axes]} if "size" in how else how
    batches = [[torch.randn(batch, 2, *(4 + plus, 5, 3)[:axes])] for batch, plus in ((2, 0), (3, 2))]
    check(lambda x: F.interpolate(x, mode=mode, **how), *batches, dynamic=[[0, 2]])


BACKWARDS = {
    ("nearest", 1): aten.upsample_nearest1d_backward, ("nearest", 2): aten.upsample_nearest2d_backward,
    ("nearest", 3): aten.upsample_nearest3d_backward, ("nearest-exact", 1): aten._upsample_nearest_exact1d_backward,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d_backward, ("nearest-exact", 3): aten._upsample_nearest_exact3d_backward,
    ("linear", 1): aten.upsample_linear1d_backward, ("bilinear", 2): aten.upsample_bilinear2d_backward,
    ("bicubic", 2): aten.upsample_bicubic2d_backward, ("trilinear", 3): aten.upsample_trilinear3d_backward,
}  # fmt: skip


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(BACKWARDS)),
    st.lists(st.integers(1, 7), min_size=3, max_size=3),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.booleans(),
)
def test_the_backward_of_each_mode(case, shape, out, align_corners):
    mode, axes = case
    operator = BACKWARDS[case].default
    shape, out = shape[:axes], out[:axes]
    gradient = torch.randn(2, 3, *out, dtype=torch.float64)
    flag = [] if mode.startswith("nearest") else [align_corners]
    arguments = [gradient, out, [2, 3, *shape], *flag, *[None] * axes]
    torch.testing.assert_close(after_autograd()[operator](*arguments), operator(*arguments))


@pytest.mark.parametrize("case", sorted(BACKWARDS))
def test_a_given_scale_is_used(case):
    """1.6 times 5 is 8, which is also the ratio; 1.7 times 5 is 8 too, and is not."""
    mode, axes = case
    operator = BACKWARDS[case].default
    gradient = torch.randn(2, 3, *[8] * axes, dtype=torch.float64)
    flag = [] if mode.startswith("nearest") else [False]
    arguments = [gradient, [8] * axes, [2, 3, *[5] * axes], *flag, *[1.7] * axes]
    torch.testing.assert_close(after_autograd()[operator](*arguments), operator(*arguments))

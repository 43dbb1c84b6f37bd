"""The padding that `auto_pad` of a convolution or a pool stands for."""

from __future__ import annotations

from collections.abc import Sequence


def automatic_pads(size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], kind: str) -> list[int]:
    """The padding that `auto_pad` means: the amounts before each axis, then those after."""
    before, after = [], []
    for length, window, stride, dilation in zip(size, kernel, strides, dilations, strict=True):
        total = max((-(-length // stride) - 1) * stride + (window - 1) * dilation + 1 - length, 0) if kind.startswith("SAME") else 0
        small, large = total // 2, total - total // 2
        before.append(large if kind == "SAME_LOWER" else small)
        after.append(small if kind == "SAME_LOWER" else large)
    return before + after

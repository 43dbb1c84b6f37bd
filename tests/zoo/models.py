"""Prove the models themselves: PyTorch runs each one forwards and backwards, gives the same numbers twice, and takes other sizes.

python -m tests.zoo.models [name or pattern ...]
"""

from __future__ import annotations

import copy
import fnmatch
import sys
import time

import torch

from .entry import Entry
from .native import answer, doubled, tree_size
from .table import ENTRIES


def prove(entry: Entry) -> str:
    """Raise if PyTorch can't train it as described; otherwise a line about it."""
    module = entry.module()
    lengths: list[int | None] = list(entry.lengths) if entry.lengths else [None]
    for size in entry.sizes:
        for length in lengths:
            inputs, targets = entry.example(size, length)
            first, second = (answer(entry, module, inputs, targets) for _ in range(2))
            assert first.loss.dim() == 0 or first.loss.numel() == 1
            assert torch.isfinite(first.loss).all(), "the loss is not finite"
            assert first.loss == second.loss, "the same batch gives two losses: something is random"
            assert any(gradient.abs().max() > 0 for gradient in first.gradients.values()), "all gradients are zero"
            for name, gradient in first.gradients.items():
                assert torch.isfinite(gradient).all(), f"the gradient of {name} is not finite"
    unused = sum(1 for name, item in module.named_parameters() if item.requires_grad and name not in first.gradients)
    try:
        answer(entry, copy.deepcopy(module).double(), doubled(inputs), doubled(targets))
        note = ""
    except RuntimeError as error:
        note = f", not in float64 ({str(error).splitlines()[0][:60]})"
    return f"{tree_size(module)} numbers" + (f", {unused} parameters unused" if unused else "") + note


def main(patterns: list[str]) -> int:
    failed = 0
    for entry in ENTRIES:
        if patterns and not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns):
            continue
        start = time.perf_counter()
        try:
            line = prove(entry)
        except Exception as error:
            failed += 1
            line = f"FAILED {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
        print(f"{entry.field:8} {entry.name:24} {time.perf_counter() - start:5.1f} s  {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

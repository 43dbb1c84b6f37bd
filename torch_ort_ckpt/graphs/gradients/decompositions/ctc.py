"""CTC loss: the probability of all alignments of a text with a sequence."""

from __future__ import annotations

from typing import Any

import torch

from .registry import before, shape_of
from .sizes import is_static

aten = torch.ops.aten
IMPOSSIBLE = -1e30
"""The logarithm of a probability of zero. The sum of two infinities has no gradient."""


@before(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss_forward(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence: the forward recursion over steps, written out. `log_probs` is [steps, batch, classes].

    The number of steps and of labels must be known, and texts be rows of `targets`; otherwise the operator stays.
    """
    if targets.dim() != 2 or log_probs.dim() != 3 or not is_static(log_probs.shape[0], targets.shape[1]):
        return NotImplemented
    steps, batch, _ = log_probs.shape
    longest = targets.shape[1]
    device, dtype = log_probs.device, log_probs.dtype
    lengths, texts = (
        value if isinstance(value, torch.Tensor) else torch.stack([torch.full([], item, device=device) for item in value])
        for value in (input_lengths, target_lengths)
    )
    # Labels with blanks around them: [batch, 2 * longest + 1].
    blanks = torch.full_like(targets, blank)
    labels = torch.cat([torch.stack([blanks, targets], 2).reshape([batch, 2 * longest]), blanks[:, :1]], 1).to(torch.int64)
    place = torch.arange(2 * longest + 1, device=device).unsqueeze(0)
    last = 2 * texts.to(torch.int64).unsqueeze(1)
    used = place <= last
    # A blank may be left out between two labels that differ.
    before_last = torch.cat([blanks[:, :1], blanks[:, :1], labels[:, :-2]], 1).to(torch.int64)
    may_skip = (place >= 2) & (labels != blank) & (labels != before_last) & used
    labels = torch.where(used, labels, blank)
    emitted = [torch.gather(log_probs[step], 1, labels) for step in range(steps)]
    nothing = torch.full([], IMPOSSIBLE, dtype=dtype, device=device)
    alpha = torch.where((place <= 1) & used, emitted[0], nothing)
    for step in range(1, steps):
        stay = alpha
        move = torch.cat([torch.full_like(alpha[:, :1], IMPOSSIBLE), alpha[:, :-1]], 1)
        skip = torch.cat([torch.full_like(alpha[:, :2], IMPOSSIBLE), alpha[:, :-2]], 1)
        paths = torch.logsumexp(torch.stack([stay, move, torch.where(may_skip, skip, nothing)]), 0)
        following = torch.where(used, torch.clamp(paths + emitted[step], min=IMPOSSIBLE), nothing)
        alpha = torch.where((step < lengths).unsqueeze(1), following, alpha)
    ends = (place == last) | (place == last - 1)
    loss = -torch.logsumexp(torch.where(ends, alpha, nothing), 1)
    infinite = loss > -IMPOSSIBLE / 2
    loss = torch.where(infinite, torch.full([], 0.0 if zero_infinity else float("inf"), dtype=dtype, device=device), loss)
    return loss, torch.zeros([batch, steps, 2 * longest + 1], dtype=dtype, device=device)


@shape_of(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss_shape(
    fake_mode: Any, operator: Any, log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch knows none for texts whose lengths are in tensors."""
    if targets.dim() != 2 or log_probs.dim() != 3:
        return NotImplemented
    steps, batch, _ = log_probs.shape
    with fake_mode:
        return log_probs.new_empty([batch]), log_probs.new_empty([batch, steps, 2 * targets.shape[1] + 1])

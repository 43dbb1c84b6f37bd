"""The tensors of an optimizer step by their role, checked, and as pieces of memory for a graph that updates them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from ...dtypes import short_name
from ...errors import CheckpointError, UnsupportedError
from ...graphs.optimizer import FIRST_MOMENTS, GRADIENTS, PARAMETERS, SECOND_MOMENTS
from .. import Tensors
from ..updates import Update
from .dlpack import has_memory
from .memory import Piece, pieces

_LARGEST = 2**31 - 1
"""Elements of a tensor on CUDA: InplaceClipGradNorm counts them in 32 bits."""
KEPT = 4
"""Number of sequences kept: gradients are in the few buffers of a pool."""

Addresses = list[list[int]]
"""Of the tensors of each role."""


class Roles:
    """The graph's inputs for the tensors of each role, cached for the few addresses they have.

    It holds no references to the tensors (a held gradient could not be reused), so it is only used for live tensors at the addresses it
    was made for. The key is the addresses of all roles together: a gradient's memory may belong to another one in the next step, and only
    together with the parameters do addresses determine the sizes.
    """

    def __init__(self, inputs: Iterable[str], make: Callable[[list[Piece]], Any], device: torch.device) -> None:
        names = set(inputs)
        self.names = [role for role in _ROLES if role in names]
        self._get = [_ROLES[role] for role in self.names]
        self._make, self._device = make, device
        self._known: dict[tuple[tuple[int, ...], ...], list[Any]] = {}

    def addresses(self, update: Update) -> Addresses:
        """The tensors' addresses. A transposed view has the same address as the tensor, so it is refused here."""
        found = [list(map(_address, get(update))) for get in self._get]
        if not (all(map(_is_contiguous, update.parameters)) and all(map(_is_contiguous, update.gradients))):
            raise refusal("strided")
        return found

    def of(self, addresses: Addresses, update: Update) -> list[Any]:
        key = tuple(map(tuple, addresses))
        if key not in self._known:
            for get in self._get:
                for tensor in get(update):
                    if not has_memory(tensor):
                        raise refusal(type(tensor).__name__)
                    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                        raise refusal("strided" if tensor.dtype is torch.float32 else short_name(tensor.dtype))
                    if tensor.device != self._device:
                        raise CheckpointError(
                            f"a parameter, gradient or moment is on {tensor.device}, the optimizer graph on {self._device}",
                            remedy="Move the model before the optimizer is made.",
                        )
                    if self._device.type == "cuda" and tensor.numel() > _LARGEST:
                        raise refusal("larger")
            if len(self._known) >= KEPT:
                self._known.clear()
            # Clipping sums the norms of the tensors: joined tensors would be summed in a different order.
            joined = update.hyperparameters.max_norm is None and update.hyperparameters.known and self._device.type == "cpu"
            sizes = [parameter.numel() for parameter in update.parameters]
            found = pieces(addresses, sizes, join=joined)
            if self._device.type == "cuda":  # an empty tensor has no address there, and nothing to update
                found = [[piece for piece in own if piece[1]] for own in found]
            self._known[key] = [self._make(own) for own in found]
        return self._known[key]


_ROLES: dict[str, Callable[[Update], Tensors]] = {
    PARAMETERS: attrgetter("parameters"),
    GRADIENTS: attrgetter("gradients"),
    FIRST_MOMENTS: lambda update: update.first or update.parameters,  # SGD declares them but does not use them
    SECOND_MOMENTS: attrgetter("second"),
}

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


def increment_versions(tensors: Tensors) -> None:
    """Tell autograd that the tensors changed: it does not see writes by ORT."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # PyTorch 2.4 accepts one tensor at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer graph takes contiguous float32 tensors, not {what} ones", remedy="Use OrtOptimizer(fused=True)."
    )

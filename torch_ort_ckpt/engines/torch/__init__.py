"""The torch engine: the translated graphs on PyTorch, with autograd for the backward."""

from .engine import TorchEngine

__all__ = ["TorchEngine"]

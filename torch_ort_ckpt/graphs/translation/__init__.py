"""ONNX graphs as `torch.fx.GraphModule`s of torch functions; `ops_*` hold the tables of operators."""

from importlib import import_module

from .registry import register_op, supported_ops
from .translate import Translation, translate

for _family in ("attention", "loss", "math", "microsoft", "nn", "pool", "reduce", "resize", "rnn", "sequence", "shape", "signal"):
    import_module(f"{__name__}.ops_{_family}")  # each fills the table of operators

__all__ = ["Translation", "register_op", "supported_ops", "translate"]

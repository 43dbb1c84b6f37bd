"""One optimizer step on tensors that PyTorch owns: by the optimizer graph in ONNX Runtime, or by the same mathematics in PyTorch."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from ..artifacts import Artifacts, OptimizerSpec
from ..errors import CheckpointError, UnsupportedError
from ..graphs import model_bytes
from . import EngineOptions, Tensors


@dataclass
class Update:
    """What one parameter group needs for one step. `step` counts from 1 and includes this one."""

    parameters: Tensors
    gradients: Tensors
    first: Tensors
    second: Tensors
    step: int
    lr: float
    hyperparameters: OptimizerSpec


class Updater(Protocol):
    def apply(self, update: Update) -> bool:
        """Change parameters and moments in place; whether it did (a graph may decide to skip)."""


class GraphUpdater:
    """Runs `optimizer_model.onnx` on the tensors' own memory.

    On the CPU a list of numpy arrays becomes a tensor sequence without a copy, so the graph updates parameters and moments in place.
    """

    def __init__(self, artifacts: Artifacts, options: EngineOptions) -> None:
        if options.device.type != "cpu":
            raise UnsupportedError(
                "the optimizer graph takes sequences, which Python can't build from device memory", remedy="Use OrtOptimizer(fused=True)."
            )
        self._artifacts = artifacts
        self._options = EngineOptions(threads=options.threads, session_options=options.session_options)
        self._sessions: dict[OptimizerSpec, Any] = {}
        self._built_in = artifacts.optimizer_spec
        session = self._default = self._session(self._built_in)
        self._names = {value.name for value in session.get_inputs()}
        self._outputs = [session.get_outputs()[0].name]
        self._lists: dict[str, dict[tuple[int, ...], list[Any]]] = {}

    def apply(self, update: Update) -> bool:
        from .sessions import ort_errors

        feeds: dict[str, Any] = {
            "learning_rate": np.array([update.lr], np.float32),
            "step": np.array([update.step], np.int64),
            "params": self._arrays("params", update.parameters),
            "gradients": self._arrays("gradients", update.gradients),
            "first_order_moments": self._arrays("first", update.first or update.parameters),
            "second_order_moments": self._arrays("second", update.second),
        }
        try:
            session = self._default if update.hyperparameters is self._built_in else self._session(update.hyperparameters)
            (updated, *_) = session._sess.run(self._outputs, {name: feeds[name] for name in feeds if name in self._names}, None)
        except ort_errors() as error:
            raise CheckpointError(
                f"ONNX Runtime could not run the optimizer graph: {error}", remedy="OrtOptimizer(..., fused=True) does the same on PyTorch."
            ) from error
        _increment_versions(update.parameters)
        return bool(np.asarray(updated).reshape(-1)[0])

    def _session(self, spec: OptimizerSpec) -> Any:
        """Hyper-parameters are attributes of the graph: other values need another session (a small one)."""
        from .sessions import make_session

        if spec not in self._sessions:
            if len(self._sessions) >= 16:
                self._sessions.clear()
            model, path = self._artifacts.optimizer, self._artifacts.optimizer_path
            built_in = spec == self._built_in
            if model is None:
                if not built_in:
                    raise UnsupportedError(
                        "hyper-parameters can't be changed in a .ort graph", path=path, remedy="Use optimizer_model.onnx."
                    )
                self._sessions[spec] = make_session(str(path), self._options)
            else:
                source = with_boolean_flag(model if built_in else with_hyperparameters(model, spec))
                self._sessions[spec] = make_session(model_bytes(source, path), self._options)
        return self._sessions[spec]

    def _arrays(self, role: str, tensors: Tensors) -> list[Any]:
        """Arrays over the tensors' memory. They hold no reference (a held gradient could not be reused), so they are only ever used
        for live tensors at the same addresses."""
        pointers = tuple([tensor.data_ptr() for tensor in tensors])  # a list first: twice as fast as a generator
        known = self._lists.setdefault(role, {})
        if pointers not in known:
            if len(known) >= 4:
                known.clear()
            known[pointers] = [_array(tensor) for tensor in tensors]
        return known[pointers]


class TorchUpdater:
    """The graph's mathematics on PyTorch's fused and foreach kernels, for any device."""

    def apply(self, update: Update) -> bool:
        spec, parameters, gradients = update.hyperparameters, list(update.parameters), list(update.gradients)
        if spec.max_norm is not None:
            clip_gradients(gradients, spec.max_norm)
        if spec.kind == "SGD":
            torch._foreach_add_(parameters, gradients, alpha=-update.lr)
            return True
        lr, eps, decay = update.lr, spec.eps, spec.weight_decay
        beta1, beta2 = spec.betas
        correction1, correction2 = 1 - beta1**update.step, math.sqrt(1 - beta2**update.step)
        # PyTorch's kernel computes p -= lr / c1 * m / (sqrt(v) / c2 + eps). Both of ORT's variants are that with other numbers:
        if not spec.correct_bias:  # p -= lr * m / (sqrt(v) + eps)
            lr, eps = lr * correction1 / correction2, eps / correction2
        elif spec.adam_mode == 1:  # p -= lr * c2 / c1 * m / (sqrt(v) + eps)
            eps = eps / correction2
        early = decay * update.lr / lr if spec.adam_mode == 0 and lr else 0.0  # mode 0 decays before the update, by the true rate
        steps = [torch.tensor(float(update.step), device=parameters[0].device)] * len(parameters)
        torch._fused_adamw_(
            parameters,
            gradients,
            list(update.first),
            list(update.second),
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=early,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        if spec.adam_mode == 1 and decay:
            torch._foreach_mul_(parameters, 1 - update.lr * decay)
        return True


def with_hyperparameters(model: onnx.ModelProto, spec: OptimizerSpec) -> onnx.ModelProto:
    """The same optimizer graph with other attributes."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    values = {"alpha": spec.betas[0], "beta": spec.betas[1], "epsilon": spec.eps, "weight_decay": spec.weight_decay}
    for node in changed.graph.node:
        if node.op_type == "AdamWOptimizer":
            kept = [item for item in node.attribute if item.name not in values]
            del node.attribute[:]
            node.attribute.extend([*kept, *(onnx.helper.make_attribute(name, float(value)) for name, value in values.items())])
    return changed


def _increment_versions(tensors: Tensors) -> None:
    """Tell autograd that the tensors changed, which it can't see when ORT writes."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # PyTorch 2.4 takes one tensor at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def with_boolean_flag(model: onnx.ModelProto) -> onnx.ModelProto:
    """ORT 1.14 and 1.15 declared the output that says whether an update took place as int64; later releases refuse such a graph."""
    flags = {node.output[0] for node in model.graph.node if node.op_type == "AdamWOptimizer"}
    if not any(value.name in flags and value.type.tensor_type.elem_type == onnx.TensorProto.INT64 for value in model.graph.output):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in changed.graph.output:
        if value.name in flags:
            value.type.tensor_type.elem_type = onnx.TensorProto.BOOL
    return changed


def clip_gradients(gradients: list[torch.Tensor], max_norm: float) -> None:
    """As ORT's InplaceClipGradNorm: scale all gradients so that their common norm is at most `max_norm`."""
    norms = torch._foreach_norm(gradients)
    total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise UnsupportedError(
            f"the optimizer graph takes contiguous float32 tensors, not {tensor.dtype}", remedy="Use OrtOptimizer(fused=True)."
        )
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), np.float32)
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.float32).reshape(tuple(tensor.shape))

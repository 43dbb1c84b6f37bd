"""`OrtModule`: a training graph as an `nn.Module` whose parameters and buffers are ordinary tensors that PyTorch owns."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..checkpoint.state import CheckpointState, OptimizerGroup, is_string
from ..checkpoint.training_graph import TrainingGraph
from ..engines import Engine, EngineOptions, OverwritingEngine, make, usable_device
from ..engines.ort.memory import side_by_side
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.inference import export_inference
from ..graphs.passes.statistics import BatchNorm, batch_norms
from ..pytorch_private import foreach_add_, is_fsdp
from ..storage.files import warn
from ..storage.paths import PathLike
from . import checkpoints
from .delivery import Loop, through_computed
from .inputs import ShapeCheck, ordered_inputs
from .optimizer_state import SavedMoments
from .scopes import Scope, compute_values, is_computed, lookup, materialize, place, refresh_values, set_own_attribute, tree_order

if TYPE_CHECKING:
    from .optimizer import OrtOptimizer


class OrtModule(TrainingGraph):
    """Runs training artifacts: `loss = model(x, y); loss.backward()`.

    In training mode the training graph runs and the loss carries gradients; in eval mode, and under `no_grad`, the eval graph runs.
    The result is the loss alone, or a tuple of the loss and the graph's extra outputs (which carry no gradients).

    - `dimensions` fixes symbolic dimensions (`{"batch": 8}`); `threads` is ORT's thread count.
    - `seed` seeds dropout; defaults to `torch.initial_seed()`, so that `torch.manual_seed` controls it.
    """

    def __init__(
        self,
        artifacts: Artifacts | PathLike,
        device: str | torch.device = "cpu",
        engine: str = "auto",
        *,
        dimensions: Mapping[str, int] | None = None,
        threads: int | None = None,
        session_options: Any = None,
        provider_options: Mapping[str, Any] | None = None,
        compile: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.artifacts = artifacts if isinstance(artifacts, Artifacts) else Artifacts.load(artifacts)
        self._options = EngineOptions(
            device=usable_device(device),
            dimensions=_known_dimensions(self.artifacts, dimensions or {}),
            threads=threads,
            session_options=session_options,
            provider_options=dict(provider_options or {}),
            compile=compile,
        )
        self._engine_name = engine
        self._engine: Engine | None = make(engine, self.artifacts, self._options)
        self.seed_dropout(_torch_seed() if seed is None else seed)
        self._follows_torch = seed is None
        self._loop = Loop()
        self._check_shapes = ShapeCheck(self.artifacts.inputs, self._options.dimensions)
        self._hooked: list[Scope] = []
        self._register(self.artifacts.state)
        checkpoints.restore_position(self, self.artifacts.state, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs in the graph's order, by keyword, or as one mapping."""
        run: Callable[[], Any] = partial(self._run, args, kwargs)
        for scope in self._sharded_scopes():  # its parameters are gathered while its own forward runs
            run = partial(scope, run)
        return run()

    def _sharded_scopes(self) -> list[Scope]:
        return [scope for scope in self._scopes if type(scope) is not Scope and is_fsdp(scope)]

    def _run(self, args: Any, kwargs: Any) -> Any:
        engine = self.engine
        training = self.training and torch.is_grad_enabled()
        tensors = self._tensors(training)
        inputs = ordered_inputs(
            engine.input_specs(tensors),
            args,
            kwargs,
            self._options.device,
            differentiable=engine.differentiable,
            provided=self.artifacts.input_gradients,
        )
        self._check_shapes(inputs, engine.differentiable)
        if training:
            if self._loop.overwrite:
                self.zero_grad()
                self._loop.overwrite = False
            outputs = engine.train(inputs, tensors, self._next_seed())
            self._count_batches()
        else:
            with torch.set_grad_enabled(engine.differentiable and torch.is_grad_enabled()):
                outputs = engine.evaluate(inputs, tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss (and extra outputs) of the training graph without autograd; gradients are added to `.grad`, as `backward` would."""
        if (type(self) is not OrtModule and is_fsdp(self)) or self._sharded_scopes():
            raise UnsupportedError(
                "train_step bypasses the forward in which FSDP2 gathers parameters, and the backward in which it reduces gradients",
                remedy="Use loss = model(...) and loss.backward().",
            )
        loop, computed = self._loop, list[str]()
        if not torch.is_grad_enabled():
            with torch.enable_grad():  # a computed parameter propagates its gradient
                return self.train_step(*args, **kwargs)
        if self._forward_pre_hooks:
            compute_values([self])
        tensors = self._tensors(training=True, computed=computed)
        inputs = ordered_inputs(self.engine.input_specs(tensors), args, kwargs, self._options.device)
        self._check_shapes(inputs, self.engine.differentiable)
        with loop.lock, torch.no_grad():
            if computed and loop.overwrite:
                self.zero_grad()
                loop.overwrite = False
            if loop.overwrite and loop.gradients is not None and self.engine.name == "ort":
                outputs, gradients = cast(OverwritingEngine, self._engine).step_into(loop.gradients, inputs, tensors, self._next_seed())
            else:
                outputs, gradients = self.engine.step(inputs, tensors, self._next_seed())
            self._count_batches()
            trained = [tensors[index] for index in self._trainable]
            loop.deliver(*(through_computed(trained, gradients) if computed else (trained, gradients)))
        return outputs[0] if len(outputs) == 1 else outputs

    def lazy_reset_grad(self) -> None:
        """The next `train_step` overwrites the gradients instead of adding to them (cheaper than setting each `.grad` to None)."""
        self._loop.overwrite = True

    @property
    def engine(self) -> Engine:
        """The engine that executes the graphs; recreated after a copy or a move to another device."""
        if self._engine is None:
            self._engine = make(self._engine_name, self.artifacts, self._options)
        return self._engine

    @property
    def nominal(self) -> bool:
        """Whether some parameter has no value yet, because the checkpoint is nominal."""
        return bool(self._unfilled)

    @property
    def partly_filled(self) -> bool:
        """Whether some parameters of a nominal checkpoint have values and others do not."""
        return self.nominal and self._unfilled != self._nominal_names

    def require_values(self) -> None:
        """Raise if values are needed that a nominal checkpoint does not have."""
        if self._unfilled:
            names = [name for name in self._places if name in self._unfilled]
            raise CheckpointError(
                f"the checkpoint is nominal: {len(names)} parameters have no values yet ({', '.join(names[:5])})",
                path=self.artifacts.checkpoint_path,
                remedy="Call model.load_checkpoint(state) or model.load_state_dict(...) first.",
            )

    def mark_filled(self, names: Iterable[str]) -> None:
        """These parameters of a nominal checkpoint have been given values."""
        self._unfilled -= set(names)

    @property
    def device(self) -> torch.device:
        return self._options.device

    @property
    def options(self) -> EngineOptions:
        return self._options

    def fix_dimensions(self, dimensions: Mapping[str, int]) -> None:
        """Fix symbolic dimensions from now on, in addition to those fixed already."""
        known = _known_dimensions(self.artifacts, {**self._options.dimensions, **dimensions})
        self._options = dataclasses.replace(self._options, dimensions=known)
        self._check_shapes = ShapeCheck(self.artifacts.inputs, known)
        self._engine = None

    def checkpoint(
        self,
        optimizer: OrtOptimizer | None = None,
        *,
        scheduler: Any = None,
        properties: Mapping[str, int | float | str] | None = None,
    ) -> CheckpointState:
        """The whole training state. The tensors are not copied. Save it with `toc.save`."""
        return checkpoints.take(self, optimizer, scheduler, properties)

    def load_checkpoint(
        self, state: CheckpointState | PathLike, optimizer: OrtOptimizer | None = None, *, scheduler: Any = None, strict: bool = True
    ) -> None:
        """Continue from a checkpoint: parameters, moments, step, learning rate, scheduler and dropout's RNG position."""
        checkpoints.restore(self, state, optimizer, scheduler, strict=strict)

    def export_inference(self, path: PathLike, outputs: Sequence[str] | None = None) -> None:
        """Write an ONNX model with the current weights, for plain `onnxruntime`.  `outputs` may name any value of the eval graph,
        the loss too; without it the extra outputs are taken."""
        self.require_values()
        export_inference(self.artifacts, self.named_tensors(), path, outputs)

    def named_trainable(self) -> dict[str, torch.Tensor]:
        """The parameters the graph gives gradients for, in the order of `named_parameters()`."""
        trained = self.artifacts.gradients
        return {name: lookup(*place) for name, place in self._places.items() if name in trained}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer of the checkpoint, by its name there, in the order of `state_dict()`."""
        refresh_values([self, *self._hooked])
        return {name: lookup(owner, key) for name, (owner, key) in self._places.items()}

    def refuse_computed(self, names: Iterable[str]) -> None:
        """Raise if one of these tensors is computed from others: a value assigned to it would be lost."""
        for name in names:
            if is_computed(*self._places[name]):
                raise UnsupportedError(
                    "is computed by pruning, a weight norm or a parametrization: it can't be assigned a value, and has no moments",
                    field=name,
                    remedy="Remove that first (prune.remove, remove_weight_norm, remove_parametrizations), or use model.state_dict().",
                )

    def seed_dropout(self, seed: int, draws: int = 0) -> None:
        """Dropout's RNG position: the base seed, and the number of training runs that have used it."""
        self.seed, self.draws = seed, draws
        self._torch_seed = _torch_seed()

    def keep_optimizer_groups(self, groups: Mapping[str, OptimizerGroup]) -> None:
        """Moments of a loaded checkpoint, until an optimizer takes them."""
        self.saved_moments.groups = dict(groups)

    def _register(self, state: CheckpointState) -> None:
        """One parameter or buffer per tensor of the checkpoint, at its dotted name."""
        specs = self.artifacts.parameters
        statistics = {name for norm in self._norms() for name in (norm.mean, norm.variance)}  # buffers in PyTorch
        self.properties = dict(state.properties)
        self.partitions = dict(state.partitions)
        self.half_precision = {name: alias.dtype for name, alias in state.mixed_precision.items()}
        self.string_tensors = {name: value for name, value in state.frozen.items() if is_string(value)}
        self.saved_moments = SavedMoments(dict(state.optimizer))
        self.names = {"trainable": list(state.trainable), "frozen": [name for name in state.frozen if name not in self.string_tensors]}
        everything = [*self.names["trainable"], *self.names["frozen"]]
        counters = [name for name in everything if name.endswith("num_batches_tracked")]
        # Set every attribute before the first parameter, which may have the same name.
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._slots: list[tuple[nn.Module, str]] = []
        self._scopes: list[Scope] = []
        self._counters: list[tuple[nn.Module, str]] = []
        self._nominal_names = set(everything) - set(counters) if state.nominal else set()  # counters start at zero, as in PyTorch
        self._unfilled = set(self._nominal_names)
        order = {name: index for index, name in enumerate(specs)}
        self._trainable = [order[name] for name in self.artifacts.trainable]
        frozen = set(range(len(specs))) - set(self._trainable) if self.artifacts.training_path is not None else ()
        self._frozen = sorted(frozen)
        slots = self._slots_side_by_side(state)
        buffers = statistics | self.artifacts.buffers
        places, values = {}, state.parameters
        for name in self.artifacts.in_order(everything):
            tensor = materialize(name, values[name], specs, state.nominal, self._options.device, slots.get(name))
            owner, key = places[name] = place(self, name, self._hooked)
            if name in state.trainable or (tensor.is_floating_point() and name not in buffers):
                owner._parameters[key] = nn.Parameter(tensor, requires_grad=name in state.trainable)
            else:
                owner._buffers[key] = tensor
        self._places.update((name, places[name]) for name in tree_order(self))
        self._slots += [places[name] for name in specs]
        self._scopes += [module for module in self.modules() if isinstance(module, Scope)]
        used = Counter(norm.mean.rpartition(".")[0] for norm in self._norms())
        self._counters += [places[name] for name in counters for _ in range(used[name.rpartition(".")[0]])]

    def _slots_side_by_side(self, state: CheckpointState) -> dict[str, torch.Tensor]:
        """Memory for the trainable parameters, in the order of their gradients: an update then treats them as one tensor."""
        if self.engine.name != "ort" or self._options.device.type != "cpu":
            return {}
        specs = self.artifacts.parameters
        shapes: dict[str, Any] = {
            name: tuple(specs[name].shape or ()) if state.nominal else tuple(state.trainable[name].shape)
            for name in self.artifacts.trainable
            if name in state.trainable and state.trainable[name].dtype is torch.float32
        }
        return dict(zip(shapes, side_by_side(list(shapes.values())), strict=True))

    def _tensors(self, training: bool, computed: list[str] | None = None) -> list[torch.Tensor]:
        """The current tensors of the graph's parameters: they may have been replaced since the last step."""
        if self._unfilled:
            self.require_values()
        if self._hooked:
            compute_values(self._hooked)
        tensors: list[torch.Tensor] = [
            owner._parameters[key] if key in owner._parameters else lookup(owner, key, computed)  # type: ignore[misc]  # never None: we put it there
            for owner, key in self._slots
        ]
        for index in self._frozen if training else ():
            if tensors[index].requires_grad:
                raise UnsupportedError(
                    "requires a gradient, but the training graph does not compute one",
                    field=list(self.artifacts.parameters)[index],
                    remedy="Export the artifacts with it trainable, or call requires_grad_(False).",
                )
        return tensors

    @torch.no_grad()
    def _detach_computed(self) -> None:
        """Parameters computed by hooks, as leaves: PyTorch can deepcopy only leaf tensors."""
        refresh_values([self, *self._hooked])

    def _norms(self) -> list[BatchNorm]:
        return batch_norms(self.artifacts.training) if self.artifacts.training is not None else []

    def _count_batches(self) -> None:
        """Update `num_batches_tracked` of BatchNorm, which the graph does not contain."""
        if not self._counters:
            return
        counters = [lookup(*place) for place in self._counters]
        if self.engine.differentiable or not all(
            type(counter) is torch.Tensor and counter.is_cpu and counter.dtype is torch.int64 and counter.numel() == 1
            for counter in counters
        ):
            with torch.no_grad():
                foreach_add_(counters, 1)
            return
        with self._loop.lock:
            for counter in counters:  # with cold caches after a run, PyTorch's operator takes 100 us
                ctypes.c_int64.from_address(counter.data_ptr()).value += 1

    def _next_seed(self) -> int | None:
        """The seed of this step, from the base seed and the number of steps seeded so far."""
        if self.engine.differentiable or not self.artifacts.random:
            return None
        with self._loop.lock:
            if self._follows_torch and _torch_seed() != self._torch_seed:  # torch.manual_seed was called since
                self.seed_dropout(_torch_seed())
            self.draws += 1
            return _mix(self.seed + self.draws * 0x9E3779B97F4A7C15)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As for every module; for a nominal checkpoint only when all values are set."""
        self.require_values()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.mark_filled(set(self._places) - set(result.missing_keys))
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        device = next((tensor.device for tensor in itertools.chain(self.parameters(), self.buffers())), self._options.device)
        if device != self._options.device:
            self._options = dataclasses.replace(self._options, device=device)
            self._engine = None
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if not set_own_attribute(self, name, value):
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Sessions can't be pickled; they are recreated after unpickling."""
        if self._options.session_options is not None:
            warn(
                "session_options can't be pickled: the copy runs with ONNX Runtime's defaults. Where they matter (custom operators), "
                "create OrtModule(artifacts, session_options=...) again and load the state dict; copy.deepcopy keeps them."
            )
        self._detach_computed()
        options = dataclasses.replace(self._options, session_options=None)
        return {**self.__dict__, "_engine": None, "_options": options}

    def __copy__(self) -> OrtModule:
        copied = type(self).__new__(type(self))
        copied.__dict__.update({**self.__dict__, "_engine": None, "_loop": Loop(self._loop.overwrite)})
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> OrtModule:
        self._detach_computed()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._options)] = self._options  # never changed; the session options in it can't be copied
        copied.__dict__.update(copy.deepcopy({**self.__dict__, "_engine": None}, memo))
        return copied


def _known_dimensions(artifacts: Artifacts, dimensions: Mapping[str, int]) -> dict[str, int]:
    for name, size in dimensions.items():
        if name not in artifacts.dimensions:
            known = ", ".join(artifacts.dimensions) or "none"
            raise CheckpointError(f"no symbolic dimension {name!r}", path=artifacts.folder, remedy=f"The graph has: {known}.")
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(
                f"dimension {name!r} must be a positive number, not {size!r}",
                path=artifacts.folder,
                remedy='For example dimensions={"batch": 32}.',
            )
    return dict(dimensions)


def _torch_seed() -> int:
    """PyTorch's seed as a checkpoint's properties can hold it (63 bits)."""
    return torch.initial_seed() & ((1 << 63) - 1)


def _mix(number: int) -> int:
    """Spreads nearby numbers over 63 bits (the finalizer of splitmix64)."""
    number &= (1 << 64) - 1
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (number ^ (number >> 31)) >> 1

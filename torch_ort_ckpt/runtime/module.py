"""`OrtModule`: a training graph as an `nn.Module` whose parameters and buffers are ordinary tensors that PyTorch owns."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..checkpoint.state import CheckpointState, OptimizerSpec
from ..checkpoint.training_graph import TrainingGraph
from ..engines import Engine, EngineOptions, make, usable_device
from ..errors import CheckpointError, UnsupportedError
from ..graphs.artifacts import Artifacts
from ..graphs.inference import export_inference
from ..pytorch_private import is_fsdp
from ..storage.files import warn
from ..storage.paths import PathLike
from . import checkpoints
from .delivery import Loop, through_computed
from .dropout import DropoutSeeds
from .inputs import ShapeCheck, ordered_inputs
from .parameters import ParameterTable
from .pretrained import load_folder, save_folder
from .scopes import Scope, compute_values, set_own_attribute, tensor_lines
from .signature import InputNames, shows_inputs


class OrtModule(TrainingGraph):
    """Runs training artifacts: `loss = model(x, y); loss.backward()`.

    In training mode the training graph runs and the loss carries gradients; in eval mode, and under `no_grad`, the eval graph runs.
    The result is the loss alone, or a tuple of the loss and the graph's extra outputs (which carry no gradients).

    - `dimensions` fixes symbolic dimensions (`{"batch": 8}`); `threads` is ORT's thread count.
    - `seed` seeds dropout; defaults to `torch.initial_seed()`, so that `torch.manual_seed` controls it.
    - `return_dict`: return the outputs by name, the loss as "loss", as transformers' models do.
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
        return_dict: bool = False,
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
        self._return_dict = return_dict
        self._input_names = InputNames([spec.name for spec in self.artifacts.inputs])
        self._engine: Engine | None = make(engine, self.artifacts, self._options)
        self._dropout = DropoutSeeds(seed)
        self._loop = Loop()
        self._check_shapes = ShapeCheck(self.artifacts.inputs, self._options.dimensions)
        # Every attribute is set before the first parameter is registered: a parameter may have the same name.
        self._table = ParameterTable(self.artifacts, self.artifacts.state)
        self._table.register(self, self.artifacts.state, self._engine, self._options.device)
        checkpoints.restore_position(self, self.artifacts.state, None)

    def extra_repr(self) -> str:
        return "\n".join([f"engine: {self._engine_name}", *(f"input {spec}" for spec in self.artifacts.inputs), *tensor_lines(self)])

    @shows_inputs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs in the graph's order, by keyword, or as one mapping. The instance's signature names them."""
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.engine.differentiable:
            from .uncompiled import outside

            return outside(self._run, args, kwargs)
        run: Callable[[], Any] = partial(self._run, args, kwargs)
        for scope in self._sharded_scopes():  # its parameters are gathered while its own forward runs
            run = partial(scope, run)
        return run()

    def _run(self, args: Any, kwargs: Any) -> Any:
        engine = self.engine
        training = self.training and torch.is_grad_enabled()
        tensors = self._table.current(training=training)
        inputs = self._inputs(args, kwargs, tensors, attached=True)
        if training:
            self._loop.reset(self)
            outputs = engine.train(inputs, tensors, self._next_seed())
            self._table.count_batches()
        else:
            with torch.set_grad_enabled(engine.differentiable and torch.is_grad_enabled()):
                outputs = engine.evaluate(inputs, tensors)
        return self._result(outputs, training)

    def _result(self, outputs: tuple[torch.Tensor, ...], training: bool) -> Any:
        if self._return_dict:
            specs = self.artifacts.outputs if training else self.artifacts.eval_outputs
            return {"loss" if place == 0 else spec.name: value for place, (spec, value) in enumerate(zip(specs, outputs, strict=True))}
        return outputs[0] if len(outputs) == 1 else outputs

    @torch.enable_grad()
    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss (and extra outputs) of the training graph without autograd; gradients are added to `.grad`, as `backward` would."""
        self._refuse_sharded()
        loop, computed = self._loop, list[str]()
        compute_values([self])
        tensors = self._table.current(training=True, computed=computed)
        inputs = self._inputs(args, kwargs, tensors, attached=False)
        with loop.lock, torch.no_grad():
            if computed:
                loop.reset(self)
            outputs, gradients = self.engine.step(inputs, tensors, self._next_seed(), reuse=loop.unneeded)
            self._table.count_batches()
            trained = self._table.trained(tensors)
            loop.deliver(*(through_computed(trained, gradients) if computed else (trained, gradients)))
        return self._result(outputs, training=True)

    def lazy_reset_grad(self) -> None:
        """The next `train_step` overwrites the gradients instead of adding to them (cheaper than setting each `.grad` to None)."""
        self._loop.overwrite = True

    def _inputs(self, args: Any, kwargs: Any, tensors: list[torch.Tensor], *, attached: bool) -> list[torch.Tensor]:
        """The user's inputs as the graph takes them; `attached` to autograd where the engine or the graph has a gradient for them."""
        engine = self.engine
        inputs = ordered_inputs(
            engine.input_specs(tensors),
            args,
            kwargs,
            self._options.device,
            differentiable=attached and engine.differentiable,
            provided=self.artifacts.input_gradients if attached else (),
        )
        self._check_shapes(inputs, engine.differentiable)
        return inputs

    def _next_seed(self) -> int | None:
        return None if self.engine.differentiable or not self.artifacts.random else self._dropout.next()

    def _sharded_scopes(self) -> list[Scope]:
        return [scope for scope in self._table.scopes if type(scope) is not Scope and is_fsdp(scope)]

    def _refuse_sharded(self) -> None:
        if (type(self) is not OrtModule and is_fsdp(self)) or self._sharded_scopes():
            raise UnsupportedError(
                "train_step bypasses the forward in which FSDP2 gathers parameters, and the backward in which it reduces gradients",
                remedy="Use loss = model(...) and loss.backward().",
            )

    @property
    def engine(self) -> Engine:
        """The engine that executes the graphs; recreated after a copy or a move to another device."""
        if self._engine is None:
            self._engine = make(self._engine_name, self.artifacts, self._options)
        return self._engine

    @property
    def nominal(self) -> bool:
        """Whether some parameter has no value yet, because the checkpoint is nominal."""
        return self._table.nominal

    @property
    def device(self) -> torch.device:
        """Where the parameters are and the graph runs."""
        return self._options.device

    @property
    def options(self) -> EngineOptions:
        """What the engine was made with: device, threads and the like."""
        return self._options

    @property
    def optimizer_spec(self) -> OptimizerSpec | None:
        """The hyper-parameters of the optimizer graph; None if the artifacts have none."""
        return self.artifacts.optimizer_spec if self.artifacts.optimizer_path is not None else None

    @property
    def seed(self) -> int:
        """The seed of dropout."""
        return self._dropout.base

    @property
    def draws(self) -> int:
        """The number of training runs that have used the seed."""
        return self._dropout.draws

    def seed_dropout(self, seed: int, draws: int = 0) -> None:
        """Set dropout's RNG position: the base seed, and the number of training runs that have used it."""
        self._dropout.set(seed, draws)

    def fix_dimensions(self, dimensions: Mapping[str, int]) -> None:
        """Fix symbolic dimensions from now on, in addition to those fixed already."""
        known = _known_dimensions(self.artifacts, {**self._options.dimensions, **dimensions})
        self._options = dataclasses.replace(self._options, dimensions=known)
        self._check_shapes = ShapeCheck(self.artifacts.inputs, known)
        self._engine = None

    def checkpoint(
        self,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        properties: Mapping[str, int | float | str] | None = None,
    ) -> CheckpointState:
        """The whole training state, with an `OrtOptimizer` or any of `torch.optim`. The tensors are not copied: save it (`toc.save`)."""
        return checkpoints.take(self, optimizer, scheduler, properties)

    def load_checkpoint(
        self, state: CheckpointState | PathLike, optimizer: Optimizer | None = None, *, scheduler: Any = None, strict: bool = True
    ) -> None:
        """Continue from a checkpoint: parameters, moments, step, learning rate, scheduler and dropout's RNG position."""
        checkpoints.restore(self, state, optimizer, scheduler, strict=strict)

    def export_inference(self, path: PathLike, outputs: Sequence[str] | None = None, *, overwrite: bool = False) -> None:
        """Write an ONNX model with the current weights, for plain `onnxruntime`.  `outputs` may name any value of the eval graph,
        the loss too; without it the extra outputs are taken. An existing file is replaced only with `overwrite`."""
        self._table.require_values()
        export_inference(self.artifacts, self.named_tensors(), path, outputs, overwrite=overwrite)

    def save_pretrained(self, folder: PathLike, *, overwrite: bool = False) -> None:
        """Write a folder as Hugging Face's libraries do: `model.safetensors`, `config.json`, and the graphs."""
        save_folder(folder, self.artifacts, self.checkpoint(), self._options.dimensions, overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, folder: PathLike, **options: Any) -> OrtModule:
        """The module that `save_pretrained` wrote. `options` are those of the constructor, and win over those in the folder."""
        artifacts, dimensions = load_folder(folder)
        return cls(artifacts, **{"dimensions": dimensions, **options})

    def named_trainable(self) -> dict[str, torch.Tensor]:
        """The parameters the graph gives gradients for, in the order of `named_parameters()`."""
        return self._table.named_trainable()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer of the checkpoint, by its name there, in the order of `state_dict()`."""
        self._table.refresh(self)
        return self._table.named()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As for every module; for a nominal checkpoint only when all values are set."""
        self._table.require_values()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._table.fill(set(self._table.names) - set(result.missing_keys))
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

    @torch.no_grad()
    def _detach_computed(self) -> None:
        """Parameters computed by hooks, as leaves: PyTorch can deepcopy only leaf tensors."""
        self._table.refresh(self)

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

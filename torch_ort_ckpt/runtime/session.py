"""`TrainingSession`: ONNX Runtime's vocabulary (state tensors, lazy reset, contiguous buffers) over `OrtModule` and `OrtOptimizer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checkpoint.state import CheckpointState, alias_agrees, alias_name, split_half_suffix
from ..errors import CheckpointError
from ..graphs.artifacts import Artifacts
from ..storage.paths import PathLike
from .checkpoints import check_fit
from .module import OrtModule
from .optimizer import OrtOptimizer
from .optimizer_state import MOMENTS

_MOMENT = re.compile(r"Moment_([12])_(.+)", re.DOTALL)
_COUNT = "Update_Count_"
_VIEW = re.compile(r"_view_\d+$")


class TrainingSession:
    """One training run: the module, its optimizer (where the artifacts have one) and a scheduler, by ORT's names.

    State tensors are the weights `<w>`, their half-precision aliases `<w>_fp16` / `<w>_bf16`, and `Moment_1_<w>`, `Moment_2_<w>` and
    `Update_Count_<w>` (the number of the next update, from 1). They are the live tensors, the counts excepted.
    """

    def __init__(
        self, artifacts: Artifacts | PathLike, device: str | torch.device = "cpu", *, fused: bool | None = None, **options: Any
    ) -> None:
        self.model = OrtModule(artifacts, device, **options)
        self.artifacts = self.model.artifacts
        trains = self.artifacts.optimizer_path is not None and self.artifacts.training_path is not None
        self.optimizer = OrtOptimizer(self.model, fused=fused) if trains else None
        self.scheduler: Any = None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss (and extra outputs); gradients accumulate until `lazy_reset_grad`."""
        self.model.train()
        return self.model.train_step(*args, **kwargs)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the evaluation graph; returns its outputs."""
        with torch.no_grad():
            return self.model.eval()(*args, **kwargs)

    def optimizer_step(self) -> bool:
        """One update; returns whether it was applied. Before any `train_step` the gradients are zeros, as in ORT: the step counts, weights
        and moments decay."""
        optimizer = self._optimizer()
        self.model._table.require_values()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in parameters):
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer.updated

    def lazy_reset_grad(self) -> None:
        """The next `train_step` starts from zero gradients."""
        self.model.lazy_reset_grad()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the steps to come."""
        for group in self._optimizer().param_groups:
            group["lr"] = float(lr)

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer().param_groups[0]["lr"])

    def register_scheduler(self, factory: Callable[[OrtOptimizer], Any]) -> Any:
        """`factory` creates a `torch.optim.lr_scheduler` from the optimizer: `lambda opt: LinearLR(opt, total_iters=100)`."""
        self.scheduler = factory(self._optimizer())
        return self.scheduler

    def scheduler_step(self) -> None:
        """Advance the registered scheduler by one step."""
        if self.scheduler is None:
            raise CheckpointError("no scheduler registered", remedy="Call register_scheduler(lambda optimizer: ...) first.")
        self.scheduler.step()

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.optimizer.checkpoint_step if self.optimizer is not None else 0

    def get_state_tensors(self, include_mixed_precision: bool = True) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        self.model._table.require_values()
        return self._state_tensors(include_mixed_precision)

    def _state_tensors(self, include_mixed_precision: bool = True) -> dict[str, torch.Tensor]:
        tensors = dict(self.model.named_tensors())
        if include_mixed_precision:
            tensors |= {alias_name(name, alias): alias for name, alias in self._aliases().items()}
        for name, states in self._moments().items():
            tensors |= {(f"{_COUNT}{name}" if key == "Update_Count" else f"{key}_{name}"): value for key, value in states.items()}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @torch.no_grad()
    def set_state_tensors(self, tensors: Mapping[str, Any], strict: bool = True) -> None:
        """Copy values into the session; a subset is enough. All names, shapes and types are checked before anything changes.

        With `strict=False` unknown names are ignored (a wrong shape or type never is). A weight given only as its half-precision alias
        sets the master; given both, they must agree.
        """
        targets = self._state_tensors()
        given = {name: value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for name, value in tensors.items()}
        if strict and (unknown := sorted(set(given) - set(targets))):
            raise CheckpointError(
                f"unknown state tensors: {', '.join(unknown[:5])}", field=unknown[0], remedy="Pass strict=False to ignore them."
            )
        given = {name: value for name, value in given.items() if name in targets}
        check_fit(given, targets)
        masters = self.model.named_tensors()
        weights, moments = {}, {}
        for name, value in given.items():
            base, dtype = split_half_suffix(name)
            if name in masters:
                weights[name] = value
            elif dtype is not None and base in masters:
                if base in given and not alias_agrees(given[base], value):
                    raise CheckpointError(
                        f"is not {base!r} rounded to half precision", field=name, remedy="Omit the alias: it is computed from its master."
                    )
                weights.setdefault(base, value.to(masters[base].dtype))
            else:
                moments[name] = value
        self.model._table.refuse_computed(weights)
        for name, value in weights.items():
            masters[name].copy_(value)
        self.model._table.fill(weights)
        for name, value in moments.items():
            self._set_moment(name, value)

    def get_optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weight -> `Moment_1`, `Moment_2`, `Update_Count`; a ZeRO shard (`<w>_view_0`) is listed under its weight's name."""
        return {self._original(name): states for name, states in self._moments().items()}

    def get_model_state(self, include_mixed_precision: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """`full_precision`, and with `include_mixed_precision` also `mixed_precision`: weight -> tensor."""
        self.model._table.require_values()
        state = {"full_precision": {name: tensor.detach() for name, tensor in self.model.named_tensors().items()}}
        if include_mixed_precision:
            state["mixed_precision"] = self._aliases()
        return state

    def get_partition_info_map(self) -> dict[str, dict[str, Any]]:
        """Weight -> `original_dim` and `megatron_row_partition`, for weights that are shards of a larger one."""
        return {
            self._original(name): {"original_dim": list(info.original_dim), "megatron_row_partition": info.megatron_row_partition}
            for name, info in self.model._table.partitions.items()
        }

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many elements the contiguous buffer has."""
        return sum(tensor.numel() for tensor in self._buffer_order(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> torch.Tensor:
        """All parameters end to end in one float32 tensor, as ORT's function of this name lays them out."""
        self.model._table.require_values()
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._buffer_order(trainable_only)])

    @torch.no_grad()
    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """The reverse; this gives a nominal checkpoint its values."""
        flat = torch.as_tensor(buffer).reshape(-1)
        tensors = self._buffer_order(trainable_only)
        if flat.dtype is not torch.float32 or flat.numel() != sum(tensor.numel() for tensor in tensors):
            raise CheckpointError(
                f"the buffer has {flat.numel()} elements of {flat.dtype}, the model {self.get_parameters_size(trainable_only)} float32",
                remedy="Make it with get_contiguous_parameters(trainable_only=...) of the same model.",
            )
        self.model._table.refuse_computed(self._buffer_names(trainable_only))
        for tensor, piece in zip(tensors, torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
        self.model._table.fill(self._buffer_names(trainable_only))

    def checkpoint(self, properties: Mapping[str, int | float | str] | None = None) -> CheckpointState:
        """The state as it is now, to be saved."""
        return self.model.checkpoint(self.optimizer, scheduler=self.scheduler, properties=properties)

    def load_checkpoint(self, state: CheckpointState | PathLike, *, strict: bool = True) -> None:
        """Go on from a state: parameters, moments, learning rate."""
        self.model.load_checkpoint(state, self.optimizer, scheduler=self.scheduler, strict=strict)

    def _optimizer(self) -> OrtOptimizer:
        if self.optimizer is None:
            lacking = "the artifacts have no optimizer_model" if self.artifacts.optimizer_path is None else "there is no training_model"
            raise CheckpointError(lacking, path=self.artifacts.folder, remedy="Export one, or use torch.optim.")
        return self.optimizer

    def _buffer_order(self, trainable_only: bool) -> list[torch.Tensor]:
        tensors = self.model.named_tensors()
        names = self._buffer_names(trainable_only)
        odd = [name for name in names if tensors[name].dtype is not torch.float32]
        if odd:
            raise CheckpointError(
                f"only float32 parameters fit a contiguous buffer, {odd[0]!r} is {tensors[odd[0]].dtype}",
                field=odd[0],
                remedy="Pass trainable_only=True, or use get_state_tensors().",
            )
        return [tensors[name] for name in names]

    def _buffer_names(self, trainable_only: bool) -> list[str]:
        return list(self.artifacts.trainable if trainable_only else self.artifacts.parameters)

    def _aliases(self) -> dict[str, torch.Tensor]:
        """Half-precision copies of the current masters."""
        tensors = self.model.named_tensors()
        return {name: tensors[name].detach().to(dtype) for name, dtype in self.model._table.half_precision.items()}

    def _moments(self) -> dict[str, dict[str, torch.Tensor]]:
        if self.optimizer is None or not MOMENTS[self.optimizer.spec.kind]:
            return {}
        self.model._table.refuse_computed(self.artifacts.trainable)
        self.optimizer.create_moments()
        found = {}
        for name, parameter in self.model.named_trainable().items():
            state = self.optimizer.state[parameter]
            keys = MOMENTS[self.optimizer.spec.kind]
            found[name] = {f"Moment_{number}": state[key] for number, key in enumerate(keys, 1)}
            found[name]["Update_Count"] = state["step"].to(torch.int64).reshape(1) + 1  # as in ORT: the number of the next update
        return found

    def _set_moment(self, name: str, value: torch.Tensor) -> None:
        parameters = self.model.named_trainable()
        if match := _MOMENT.fullmatch(name):
            key = MOMENTS[self._optimizer().spec.kind][int(match[1]) - 1]
            self._optimizer().state[parameters[match[2]]][key].copy_(value)
        else:
            self._optimizer().set_step(parameters[name.removeprefix(_COUNT)], int(value.item()) - 1)

    def _original(self, name: str) -> str:
        base = _VIEW.sub("", name)
        return base if name in self.model._table.partitions or base not in self.model.named_tensors() else name

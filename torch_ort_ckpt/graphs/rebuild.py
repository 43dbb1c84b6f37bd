"""`rebuild_artifacts`: training artifacts made again from others, or from an inference model and a loss, without PyTorch code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import torch

from ..checkpoint.state import OptimizerSpec
from ..errors import CheckpointError, MissingFileError
from ..storage.paths import PathLike, as_path
from .artifact_writer import Made, Target, tell_terminal
from .artifacts import Artifacts
from .description import ORDER
from .gradients.clients import client_of
from .gradients.contract import training_model
from .gradients.example_batch import batch_of, open_sizes
from .gradients.inference_graph import as_artifacts
from .gradients.rebuild import argument_names, forward_module, rebuilt, rename_values, with_names
from .gradients.torch_builder import Gradients, build
from .gradients.with_loss import output_names
from .optimizer import optimizer_spec
from .translation.constants import identifier

Sizes = Mapping[str, Mapping[int, str]]


def rebuild_artifacts(
    source: Artifacts | PathLike,
    out: PathLike,
    loss: Any = None,
    optimizer: str | OptimizerSpec | torch.optim.Optimizer | None = None,
    *,
    outputs: Sequence[str] | None = None,
    frozen: Iterable[str] = (),
    extra_outputs: bool | Sequence[str] = False,
    example_inputs: Sequence[torch.Tensor] | None = None,
    example_targets: Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    dynamic_shapes: Sizes | None = None,
    class_axis: int | None = None,
    prefix: str = "",
    for_ort: str | None = None,
    opset: int | None = None,
    nominal: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Artifacts:
    """Make the training artifacts of `source` again in the folder `out`, with gradients made by PyTorch; needs no onnxruntime.

    From a folder of artifacts, whoever made them: names, inputs, outputs, dynamic dimensions, what is trained, the optimizer, values,
    moments and step are kept. With a `loss`, the values called `outputs` are trained with it instead of the old loss.

    From an inference model (`.onnx`) and a `loss` (as in `export_artifacts`, on the model's outputs): float32 weights are trained under
    the names of their initializers, except those that `frozen` names. BatchNorm keeps its statistics, and there is no dropout: an
    inference model does not have what training would change. With `loss=None` the model's first output must be its loss.

    - `optimizer`: by default the source's own, and AdamW for an inference model.
    - `example_inputs`: tensors that the graph takes, in its order; by default made from the graph's inputs.
    - `dynamic_shapes`: input -> {axis: name}; by default the dimensions that the graph leaves open.
    - The other arguments are those of `export_artifacts`.
    """
    tell = progress or tell_terminal
    client = client_of(for_ort)
    target = Target(as_path(out), client, prefix, nominal, overwrite)
    target.refuse_existing()
    place = None if isinstance(source, Artifacts) else as_path(source)
    if place is not None and not place.exists():
        raise MissingFileError("no such folder or file", path=place, remedy="Give a folder of training artifacts, or an .onnx model.")
    single = place is not None and place.is_file()
    found = as_artifacts(place) if place is not None and single else _loaded(source)
    spec = optimizer_spec(optimizer) if optimizer is not None else _own_optimizer(found, single)
    if single or loss is not None:
        options = {"example_targets": example_targets, "class_axis": class_axis, "frozen": frozen, "extra_outputs": extra_outputs}
        made = _from_outputs(found, loss, _outputs(found, outputs, single), example_inputs, dynamic_shapes, opset, tell, options)
    else:
        _refuse_without_loss(
            outputs=outputs, frozen=list(frozen), extra_outputs=extra_outputs, class_axis=class_axis, example_targets=example_targets
        )
        made = rebuilt(found, example_inputs=example_inputs, dynamic_shapes=dynamic_shapes, opset=opset, tell=tell)
    tell("writing the artifacts")
    training, as_float = training_model(made.graph, list(made.states))
    values = {name: value.to(torch.float32) if name in as_float else value for name, value in made.states.items()}
    for graph in (training, made.evaluation):
        if graph is not None:
            _copy_order(found, graph)
    state = client.continued(found.state, made.trainable, values)
    return target.write(Made(training, made.evaluation, made.trainable, values), spec, state)


def _loaded(source: Artifacts | PathLike) -> Artifacts:
    return source if isinstance(source, Artifacts) else Artifacts.load(source)


def _own_optimizer(artifacts: Artifacts, single: bool) -> OptimizerSpec | None:
    if single:
        return optimizer_spec("adamw")
    if artifacts.optimizer_path is None:
        return None
    spec = artifacts.optimizer_spec
    if not spec.known:
        raise CheckpointError(
            "the hyper-parameters of a .ort optimizer graph can't be read", path=artifacts.optimizer_path, remedy="Pass optimizer=."
        )
    return spec


def _outputs(artifacts: Artifacts, asked: Sequence[str] | None, single: bool) -> list[str]:
    """The values that a new loss is computed from."""
    if asked is not None:
        return [asked] if isinstance(asked, str) else list(asked)
    if single:
        return [spec.name for spec in artifacts.eval_outputs]
    extras = [spec.name for spec in artifacts.outputs[1:]]
    if not extras:
        raise CheckpointError(
            "another loss needs to know which value of the graph it takes",
            path=artifacts.folder,
            field="outputs",
            remedy='Name it: outputs=["logits"]. Names of values are in the .onnx file: onnx.load(path).graph.',
        )
    return extras


def _from_outputs(
    artifacts: Artifacts,
    loss: Any,
    outputs: list[str],
    example: Sequence[torch.Tensor] | None,
    asked: Sizes | None,
    opset: int | None,
    tell: Callable[[str], None],
    options: Mapping[str, Any],
) -> Gradients:
    """The gradients of a loss over these values of the graph."""
    module = forward_module(artifacts, outputs)
    taken = argument_names(module)
    known = {_argument(spec.name, taken): spec for spec in artifacts.inputs}
    specs = [known[name] for name in taken]
    values = batch_of(specs, module) if example is None else list(example)
    sizes = open_sizes(specs) if asked is None else asked
    by_name = {spec.name: name for name, spec in zip(taken, specs, strict=True)}
    shapes = {by_name.get(name, name): axes for name, axes in sizes.items()}
    chosen = options["extra_outputs"]
    if not isinstance(chosen, bool):
        plain = output_names(len(outputs))
        chosen = [plain[outputs.index(name)] if name in outputs else name for name in chosen]
    found = build(module, values, loss, dynamic_shapes=shapes, opset=opset, tell=tell, **{**options, "extra_outputs": chosen})
    names = {argument: spec.name for argument, spec in zip(taken, specs, strict=True)}
    names |= dict(zip(output_names(len(outputs)), outputs, strict=True))
    graph = with_names(found.graph, names)
    assert found.evaluation is not None
    rename_values(found.evaluation, names)
    return dataclasses.replace(found, graph=graph)


def _argument(name: str, taken: Sequence[str]) -> str:
    """What the module calls an input of the graph."""
    text = identifier(name)
    return text if text in taken else f"{text}_"


def _copy_order(source: Artifacts, target: onnx.ModelProto) -> None:
    """The order of the module that the source was exported from."""
    if source.training is None or any(entry.key == ORDER for entry in target.metadata_props):
        return
    for entry in source.training.metadata_props:
        if entry.key == ORDER:
            target.metadata_props.add(key=ORDER, value=entry.value)


def _refuse_without_loss(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False and value != []:
            raise CheckpointError(
                f"{name} is for another loss or an inference model", field=name, remedy="Pass loss= too, or leave it out: all is kept."
            )

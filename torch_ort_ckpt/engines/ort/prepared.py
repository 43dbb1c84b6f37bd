"""Training and eval graphs in the form in which this build of onnxruntime runs them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from ...errors import UnsupportedError
from ...graphs.artifacts import Artifacts
from ...graphs.description import ACCUMULATION_BUFFER, copy_of
from ...graphs.limits import refuse_wrong
from ...graphs.passes.dimensions import fix_dimensions
from ...graphs.passes.direct_gradients import direct_gradient_names, direct_gradients
from ...graphs.passes.direct_updates import direct_updates, updated_buffers
from ...graphs.passes.pipelines import AFTER_GRADIENTS, apply
from ...graphs.passes.unbiased_variance import unbias_variances, unbiased_variances
from ...graphs.passes.versions import lower_versions
from ...graphs.standard.lowering import lowered
from ...graphs.standard.random import SEED, add_seed
from .. import EngineOptions
from .build import installed
from .labels import NO_CHECKS, LabelChecks, check_labels, given_labels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A graph to run: its gradients' outputs in the order of `artifacts.trainable`, and what surrounds a run."""

    model: onnx.ModelProto
    gradients: list[str] = field(default_factory=list)
    written: Mapping[str, str] = field(default_factory=dict)
    """Outputs that replace a parameter's value, by parameter name."""
    labels: LabelChecks = NO_CHECKS
    seed: str | None = None
    """The input that takes the seed of dropout; without it the graph's own operators draw from the process-wide generator."""


def training_graph(model: onnx.ModelProto, artifacts: Artifacts, options: EngineOptions) -> Prepared:
    """The training graph, with gradients and new values of buffers as outputs."""
    return (_as_it_is if installed().trains else _lowered)(model, artifacts, options)


def eval_graph(model: onnx.ModelProto, artifacts: Artifacts, options: EngineOptions) -> Prepared:
    refuse_wrong(model, artifacts.eval_path)
    changed = copy_of(model)
    labels = check_labels(changed, artifacts.inputs) if options.device.type == "cpu" else NO_CHECKS
    lower_versions(changed)
    return Prepared(changed, labels=labels)


def _as_it_is(model: onnx.ModelProto, artifacts: Artifacts, options: EngineOptions) -> Prepared:
    """For a training build: with fixed dimensions, repaired and checked."""
    names = direct_gradient_names(model)
    changed = copy_of(model)
    fix_dimensions(changed, options.dimensions)
    for line in apply(changed, AFTER_GRADIENTS):
        logger.info("%s", line)
    refuse_wrong(changed, artifacts.training_path)
    direct_gradients(changed)
    written, labels = updated_buffers(changed), NO_CHECKS
    direct_updates(changed)
    if options.device.type == "cpu":  # cuDNN keeps the unbiased variance, as PyTorch does
        written |= unbiased_variances(changed)
        unbias_variances(changed)
        labels = check_labels(changed, artifacts.inputs)
    lower_versions(changed)
    gradients = [names[spec.name.removesuffix(ACCUMULATION_BUFFER)] for spec in artifacts.gradients.values()]
    return Prepared(changed, gradients, written, labels)


def _lowered(model: onnx.ModelProto, artifacts: Artifacts, options: EngineOptions) -> Prepared:
    """For a stock build: the joint graph of standard operators, whose dropout takes a seed as an input."""
    labels = given_labels(model, artifacts.inputs) if options.device.type == "cpu" else NO_CHECKS
    joint, _ = lowered(artifacts)
    fix_dimensions(joint.model, options.dimensions)
    random = add_seed(joint.model)
    lower_versions(joint.model)
    found = {artifacts.aliases.get(name, name): gradient for name, gradient in joint.gradients.items()}
    if lacking := [name for name in artifacts.trainable if name not in found]:
        raise UnsupportedError(
            "the loss does not depend on this parameter, which the graph trains",
            path=artifacts.training_path,
            field=lacking[0],
            remedy='Use engine="torch", or export the artifacts without it.',
        )
    gradients = [found[name] for name in artifacts.trainable]
    return Prepared(joint.model, gradients, joint.updates, labels, SEED if random else None)

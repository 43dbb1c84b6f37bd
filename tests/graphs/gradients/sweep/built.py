"""A case of the sweep through the stages that `export_artifacts` uses: `build`, then onnxruntime on the joint graph, against PyTorch."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch

from torch_ort_ckpt.graphs.gradients.torch_builder import build

from .case import Case
from .onnx_joint import Called


def worst_difference(case: Case, batches: tuple[int, ...] = (4, 7)) -> float:
    """The largest difference of loss, gradients and updated buffers at these batch sizes, relative to the largest element of each."""
    import onnxruntime

    torch.manual_seed(0)
    module = Called(case.module())
    examples = [case.inputs(batch) for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = build(module, examples[0], None, evaluation=False)
    graph = found.graph
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    states = {name: value.numpy() for name, value in found.states.items() if name in taken}
    worst = 0.0
    for example in examples:
        twin = copy.deepcopy(module)
        loss = twin(*example)
        loss.backward()
        expected = {graph.loss: loss.detach()}
        expected |= {graph.gradients[name]: value.grad for name, value in twin.named_parameters() if name in graph.gradients}
        expected |= {graph.updates[name]: value for name, value in twin.named_buffers() if name in graph.updates}
        feed = {name: value.numpy() for name, value in zip(graph.inputs, example, strict=True) if name in taken}
        for name, ours in zip(expected, session.run(list(expected), {**states, **feed}), strict=True):
            theirs = expected[name].numpy()
            assert ours.shape == theirs.shape, f"{name}: {ours.shape} instead of {theirs.shape}"
            difference = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))
            worst = difference if not difference <= worst else worst  # NaN stays
    return worst

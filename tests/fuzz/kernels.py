"""One random chain on engine "ort", engine "torch" and in plain PyTorch; and a process to do it in, since ORT may crash.

A case is plain data: `{"numbers": [...], "layers": [[name, [...]], ...], "batches": [...], "threads": 1}`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_ort_ckpt as toc
from torch_ort_ckpt.graphs.passes.pipelines import repair_forward

from . import shape_layers
from .chains import Chain, Choices
from .layers import LAYERS

__all__ = ["LAYERS", "Worker", "check", "shape_layers"]

Case = dict[str, Any]

OPSETS = (15, 18, 17)
SAMPLES = ((6,), (4, 5), (3, 6, 5), (4, 3, 4, 5), (1, 1), (2, 7))


def build(case: Case) -> Chain:
    choices = Choices(case["numbers"])
    opset, sample = choices.of(OPSETS), choices.of(SAMPLES)
    chain = Chain(opset, sample, torch.Generator().manual_seed(choices.pick(1000)))
    fixed = choices.flag()
    if fixed:
        chain.batch_name = case["batches"][0]
    chain.then("Mul", ["x", chain.weight(*sample, scale=1.0)], torch.mul)  # so that every layer has a gradient to pass on
    for name, numbers in case["layers"]:
        if chain.loss is None:
            LAYERS[name](chain, Choices(numbers))
    chain.finish()
    return chain


def check(case: Case) -> str:
    """The outcome: "equal", "wrong ..." with the difference, or why ORT refuses it."""
    chain = build(case)
    with tempfile.TemporaryDirectory() as folder:
        reason = generate(chain, Path(folder))
        if reason is not None:
            return f"no gradient: {reason}"
        return compare(chain, case, Path(folder))


def generate(chain: Chain, folder: Path) -> str | None:
    """The artifacts as `export_artifacts` makes them of an exported graph; returns why ORT's builder can't."""
    from onnxruntime.training import artifacts

    from torch_ort_ckpt.graphs.onnxruntime_package import ort_errors

    model = chain.model()
    repair_forward(model)
    try:
        artifacts.generate_artifacts(
            model, requires_grad=list(chain.weights), frozen_params=list(chain.statistics), artifact_directory=str(folder)
        )
    except ort_errors() as error:
        return str(error).splitlines()[0]
    return None


def compare(chain: Chain, case: Case, folder: Path) -> str:
    artifacts = toc.Artifacts.load(folder)
    models = [toc.OrtModule(artifacts, engine="torch")]
    refused = None
    try:
        models.insert(0, toc.OrtModule(artifacts, engine="ort", threads=case["threads"]))
        models[0].engine.training_graph()  # type: ignore[attr-defined]
    except toc.CheckpointError as error:
        refused, models = str(error), models[-1:]
        if toc.OrtModule(artifacts).engine.name != "torch":
            return f"wrong: auto takes ort, which refuses: {error}"
    exact = {name: value.double().requires_grad_() for name, value in chain.weights.items()}
    exact |= {name: value.double() for name, value in chain.statistics.items()}
    sizes = case["batches"] if chain.batch_name == "batch" else case["batches"][:1] * 2
    for size in sizes:
        if size == 1 and chain.statistics:  # PyTorch refuses a BatchNorm of one value per channel
            continue
        batch = chain.batch(size)
        single = {name: value.detach().float().requires_grad_(value.requires_grad) for name, value in exact.items()}
        rounded = results(chain, batch, single)
        expected = results(chain, {**batch, "x": batch["x"].double()}, exact)
        noise = 30 * max(differences(rounded, expected).values())
        for model in models:
            model.zero_grad()
            try:
                loss = model(**{spec.name: batch[spec.name] for spec in artifacts.inputs})
            except toc.CheckpointError as error:
                return f"failed: {error}"
            loss.backward()
            found = {"loss": loss.detach(), **{name: getattr(model, name).detach() for name in chain.statistics}}
            found |= {f"gradient of {name}": getattr(model, name).grad for name in artifacts.trainable}
            for name, off in differences(found, expected).items():
                # ORT approximates tanh and sigmoid: small gradients are less exact than PyTorch's.
                if not off <= max(1e-2 if name.startswith("gradient") else 1e-3, noise):
                    return f"wrong {name} ({model.engine.name}, batch {size}): off by {off:.2g}"
    return "equal" if refused is None else f"refused: {refused}"


def results(chain: Chain, batch: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, gradients and statistics by PyTorch."""
    loss = chain.run(batch, parameters)
    gradients = torch.autograd.grad(loss, [parameters[name] for name in chain.weights], materialize_grads=True)
    named = {f"gradient of {name}": value for name, value in zip(chain.weights, gradients, strict=True)}
    return {"loss": loss.detach(), **named, **{name: parameters[name].clone() for name in chain.statistics}}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative to each tensor's largest element; values that are tiny compared with the largest gradient of all count as zero."""
    largest = max(float(value.abs().max()) for name, value in expected.items() if name.startswith("gradient"))
    return {
        name: float(torch.nan_to_num(value.double() - expected[name].reshape(value.shape), math.inf).abs().max())
        / max(float(expected[name].abs().max()), 1e-2 * largest, 1e-3)
        for name, value in found.items()
    }


class Worker:
    """Checks cases in another process, and starts a new one when ORT crashes it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check(self, case: Case) -> str:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.kernels"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            return str(json.loads(answer))
        return f"wrong: the process died ({self._process.wait()})"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    for line in sys.stdin:
        try:
            result = check(json.loads(line))
        except Exception as error:  # a fault of the case itself: shown, not hidden behind a dead process
            result = f"broken: {type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

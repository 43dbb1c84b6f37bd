"""What works on this machine, what does not, and the command that changes it: the function behind `torch-ort-ckpt doctor`.

Features are tried rather than inferred from version numbers: formats write and read a small state, engines run a graph. ONNX Runtime
is tried in a process of its own, since a damaged installation can crash the process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ..catalog import FORMATS
from ..checkpoint.state import CheckpointState, OptimizerGroup
from ..engines.ort.build import OLDEST, version_number
from ..errors import CheckpointError, MissingDependencyError
from ..formats import load, module, save
from ..storage.system import is_windows

WORKS, ABSENT, PROBLEM = "works", "absent", "problem"

_OPTIONAL = {
    "h5py": "legacy",
    "lightning": "lightning",
    "tensorboard": "tensorboard",
}
"""Package -> the extra that installs it."""

_PACKAGE = "onnxruntime-training-cpu==1.19.2"
_LAST_TRAINING = "CUDA 11.8 and cuDNN 8 for onnxruntime-training 1.19.2"
_LAST_CUDA = (3, 11)
"""The last Python with wheels of onnxruntime-training 1.19.2."""


@dataclass(frozen=True)
class Check:
    """One finding. `status` is `works`, `absent` (optional and not here) or `problem` (here and not right); `fix` is a command."""

    area: str
    name: str
    status: str
    detail: str
    fix: str | None = None


def examine() -> list[Check]:
    """All checks, in the order of the output."""
    facts = _try_onnxruntime()
    found = {name: importlib.metadata.version(name) for name in _distributions()}
    ort = ort_engine(facts)
    engines = [ort, *_torch_engines(), auto_engine(facts, ort)]
    return [_system(), *_packages(), onnxruntime_package(found), *engines, *_formats(), *_cuda(facts)]


def onnxruntime_package(found: dict[str, str]) -> Check:
    """Which distributions (with their versions) provide the package `onnxruntime`. Two overwrite each other's files: neither is intact."""
    if not found:
        return Check("packages", "onnxruntime", ABSENT, "for engine ort and for exporting artifacts", _install_ort())
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        fix = f"pip uninstall -y {' '.join(found)} && {_install_ort()}"
        return Check("packages", "onnxruntime", PROBLEM, f"{len(found)} distributions overwrite each other: {listed}", fix)
    return Check("packages", "onnxruntime", WORKS, listed)


def _system() -> Check:
    where = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("system", "python", WORKS, f"{platform.python_version()} on {where}")


def _packages() -> Iterator[Check]:
    for name in ("numpy", "onnx", "torch", *_OPTIONAL):
        try:
            yield Check("packages", name, WORKS, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            needed = name not in _OPTIONAL
            fix = f"pip install {name}" if needed else _pip(_OPTIONAL[name])
            yield Check("packages", name, PROBLEM if needed else ABSENT, "needed" if needed else "optional", fix)


# engines

_TRY_ONNXRUNTIME = """
import ctypes, json, pathlib, sys
import numpy, torch, onnxruntime
tell = lambda **facts: print("fact " + json.dumps(facts), flush=True)
session = onnxruntime.InferenceSession(sys.stdin.buffer.read(), providers=["CPUExecutionProvider"])
result = session.run(None, {"x": numpy.ones(2, numpy.float32)})[0].tolist()
tell(version=onnxruntime.__version__, providers=onnxruntime.get_available_providers(), result=result)
if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
    place = pathlib.Path(onnxruntime.__file__).parent / "capi"
    try:
        for name in sys.argv[1:]:
            ctypes.CDLL(str(place / name), ctypes.RTLD_GLOBAL)
        tell(cuda=None)
    except OSError as error:
        tell(cuda=str(error))
from onnxruntime.capi import _pybind_state
if hasattr(_pybind_state, "Module"):
    import onnxruntime.training.api
tell(trains=hasattr(_pybind_state, "Module"))
"""
"""Prints each fact as soon as it is known; if it fails, the reason is the last line of standard error."""


def _try_onnxruntime() -> dict[str, Any] | None:
    """The facts from a fresh process that imported it and ran a graph of one node, `error` where it ended early; None if not installed."""
    if not _distributions():
        return None
    command = [sys.executable, "-c", _TRY_ONNXRUNTIME, *provider_libraries()]
    try:
        done = subprocess.run(command, input=one_node().SerializeToString(), capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    facts: dict[str, Any] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("fact "):
            facts |= json.loads(line.removeprefix("fact "))
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        facts["error"] = lines[-1] if lines else f"the process died with code {done.returncode}"
    return facts


def provider_libraries() -> list[str]:
    """The files of the CUDA provider."""
    name = "onnxruntime_providers_{}.dll" if is_windows() else "libonnxruntime_providers_{}.so"
    return [name.format(part) for part in ("shared", "cuda")]


def ort_engine(facts: dict[str, Any] | None) -> Check:
    """The ort engine, from the facts of the trial process."""
    again = f"pip install --force-reinstall --no-deps {_PACKAGE}"
    if facts is None:
        return Check("engines", "ort", ABSENT, "ONNX Runtime is not installed; engine torch runs the same artifacts", _install_ort())
    if "result" not in facts:
        return Check("engines", "ort", PROBLEM, f"importing it or running a graph fails: {facts.get('error')}", again)
    if facts["result"] != [2.0, 2.0]:
        return Check("engines", "ort", PROBLEM, f"1 + 1 gives {facts['result']}", again)
    if "trains" not in facts:
        detail = f"onnxruntime {facts['version']} can't train: {facts.get('error')}"
        return Check("engines", "ort", PROBLEM, detail, f"pip uninstall -y {' '.join(_distributions())} && {_install_ort()}")
    providers = ", ".join(facts["providers"])
    if facts["trains"]:
        return Check("engines", "ort", WORKS, f"onnxruntime {facts['version']} with training: {providers}")
    if version_number(facts["version"]) < OLDEST:
        least = ".".join(map(str, OLDEST))
        detail = f"onnxruntime {facts['version']} is too old to train on standard operators, which works from {least} on"
        return Check("engines", "ort", PROBLEM, detail, "pip install --upgrade onnxruntime")
    return Check("engines", "ort", WORKS, f"onnxruntime {facts['version']}, a stock build, on standard operators: {providers}")


def auto_engine(facts: dict[str, Any] | None, ort: Check) -> Check:
    """What `engine="auto"` takes here, and why."""
    if ort.status != WORKS or facts is None:
        return Check("engines", "auto", WORKS, f"torch: {ort.detail}")
    if facts["trains"]:
        return Check("engines", "auto", WORKS, "ort: a training build runs every artifact as it is")
    detail = "ort for artifacts of export_artifacts; torch for those that ONNX Runtime made, whose gradients a stock build would rebuild"
    return Check("engines", "auto", WORKS, detail)


def _torch_engines() -> Iterator[Check]:
    from ..graphs.translation.registry import supported_ops
    from ..graphs.translation.translate import translate

    try:
        (result,) = translate(one_node()).module(torch.ones(2))
        known = sum(map(len, supported_ops().values()))
        good = result.tolist() == [2.0, 2.0]
        yield Check("engines", "torch", WORKS if good else PROBLEM, f"torch {torch.__version__}, {known} operators")
    except CheckpointError as error:
        yield Check("engines", "torch", PROBLEM, str(error), "pip install --upgrade onnx torch")
    compiler = next((name for name in (os.environ.get("CXX", ""), "g++", "clang++", "cl") if name and shutil.which(name)), None)
    if compiler:
        yield Check("engines", "torch, compile=True", WORKS, f"compiler {compiler}")
    else:
        detail = "torch.compile needs a C++ compiler for the CPU, and finds none"
        yield Check("engines", "torch, compile=True", ABSENT, detail, "apt install g++ (or set CXX to your compiler)")


def one_node() -> onnx.ModelProto:
    """y = x + x, for every release of ORT."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doctor", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


# formats


def _formats() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="torch-ort-ckpt-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that dcp is used by one process
        for name in FORMATS:
            if not hasattr(module(name), "write"):
                yield Check("formats", name, WORKS, "reads")
            else:
                yield _round_trip(name, Path(folder))


def _round_trip(name: str, folder: Path) -> Check:
    state = CheckpointState(trainable={"w": torch.arange(4.0)})
    path = folder / f"{name}{next(iter(module(name).SUFFIXES), '')}"
    if name == "onnx":  # puts weights into an existing model
        model = one_node()
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.float32), "w"))
        path.write_bytes(model.SerializeToString())
    else:
        state.optimizer["group0"] = OptimizerGroup(1, states={"w": {"momentum0": torch.ones(4), "momentum1": torch.ones(4)}})
    try:
        save(state, path, format=name, durable=False)
        back = load(path, format=name, mmap=False)
    except MissingDependencyError as error:
        return Check("formats", name, ABSENT, f"reads; writing: {error.message}", error.remedy)
    except CheckpointError as error:
        return Check("formats", name, PROBLEM, str(error))
    same = torch.equal(torch.as_tensor(back.parameters["w"]), state.trainable["w"]) and back.step == state.step
    return Check("formats", name, WORKS if same else PROBLEM, "reads and writes" if same else "does not read back what it wrote")


# CUDA


def _cuda(facts: dict[str, Any] | None) -> Iterator[Check]:
    here = torch.cuda.is_available()
    if here:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Check("cuda", "torch", WORKS, f"CUDA {torch.version.cuda}: {names}")
    elif torch.version.cuda is None:
        driver = shutil.which("nvidia-smi") is not None
        detail = "this build of torch is for the CPU" + (", though this machine has an NVIDIA driver" if driver else "")
        yield Check("cuda", "torch", ABSENT, detail, "pip install --force-reinstall torch (the CUDA build)" if driver else None)
    else:
        yield Check("cuda", "torch", ABSENT, f"built for CUDA {torch.version.cuda}, and finds no device", "nvidia-smi shows why")
    if facts is not None and "providers" in facts:
        yield ort_cuda(facts, here)


def ort_cuda(facts: dict[str, Any], device: bool) -> Check:
    """ORT's CUDA provider, from the facts of the trial process; `device`: whether there is one to run on."""
    if "cuda" not in facts:
        detail = "this build of onnxruntime has no CUDA provider"
        extra = "cuda" if _python_has(_LAST_CUDA) else "cuda12"
        swap = f"pip uninstall -y {' '.join(_distributions())} && {_pip(extra)}" if device else None
        return Check("cuda", "onnxruntime", ABSENT, detail, swap)
    if facts["cuda"] is None:
        return Check(
            "cuda",
            "onnxruntime",
            WORKS,
            "the CUDA provider loads; `inspect` on artifacts names the nodes it runs on the CPU",
        )
    wanted = "CUDA 12 or 13 and cuDNN 9 for onnxruntime-gpu" if facts.get("trains") is False else _LAST_TRAINING
    fix = f"install {wanted}, and add their folders to {'PATH' if is_windows() else 'LD_LIBRARY_PATH'}"
    return Check("cuda", "onnxruntime", PROBLEM if device else ABSENT, f"the CUDA provider does not load: {facts['cuda']}", fix)


# commands


def _distributions() -> list[str]:
    return sorted(set(importlib.metadata.packages_distributions().get("onnxruntime", ())))


def _pip(extra: str) -> str:
    """In double quotes, which every shell takes: cmd.exe passes single ones on."""
    return f'pip install "torch-ort-ckpt[{extra}]"'


def _python_has(last: tuple[int, int]) -> bool:
    return sys.version_info[:2] <= last


def _install_ort() -> str:
    return _pip("ort")

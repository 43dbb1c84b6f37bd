"""What the installed build of onnxruntime can do, read from the package itself: the one place that decides it.

There are two kinds. A training build (onnxruntime-training, which ended with 1.19.2) has gradient kernels, accumulators and optimizers: it
runs artifacts as they are. A stock build (onnxruntime) only infers: it runs graphs of standard operators, to which artifacts are lowered
in memory (see `prepared`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...errors import MissingDependencyError
from ...graphs.onnxruntime_package import import_onnxruntime

OLDEST = (1, 15)
"""The oldest stock release with a wheel for Python 3.11; `tox -e stock-oldest` tests it."""


@dataclass(frozen=True)
class Build:
    """An installed onnxruntime."""

    version: str
    trains: bool
    """Whether it has the training operators."""
    dlpack: bool
    """Whether its OrtValues take and give DLPack: training builds, and every build from 1.21. Others share memory by its address."""

    def __str__(self) -> str:
        return f"onnxruntime{'-training' if self.trains else ''} {self.version}"


@functools.cache
def installed() -> Build:
    """The build that is imported in this process."""
    onnxruntime = import_onnxruntime()
    from onnxruntime.capi import _pybind_state as native

    found = Build(
        version=str(onnxruntime.__version__),
        trains={"Module", "Optimizer"} <= set(dir(native)),
        dlpack={"from_dlpack", "to_dlpack"} <= set(dir(native.OrtValue)),
    )
    if not found.trains and version_number(found.version) < OLDEST:
        raise MissingDependencyError(
            f"{found} is too old: training on a stock build works from {'.'.join(map(str, OLDEST))} on",
            remedy='pip install --upgrade onnxruntime, or use engine="torch".',
        )
    return found


def version_number(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())

"""The commands on training artifacts."""

from __future__ import annotations

import argparse

from ..checkpoint.state import format_bytes
from ..formats import load
from ..graphs.rebuild import rebuild_artifacts
from ..graphs.standard.export import MODEL, STATE, export_step_model
from ..integrations.executorch import export_executorch
from ..storage.paths import as_path
from .output import print_line
from .writing import escaped


def run_rebuild(options: argparse.Namespace) -> int:
    made = rebuild_artifacts(
        options.source,
        options.folder,
        options.loss,
        options.optimizer,
        outputs=options.outputs,
        frozen=options.frozen,
        class_axis=options.class_axis,
        for_ort=options.for_ort,
        overwrite=options.overwrite,
        progress=lambda text: print_line(escaped(text)),
    )
    print_line(f"{escaped(str(made.folder))}: {len(made.trainable)} parameters are trained, {len(made.state.frozen)} tensors are not")
    return 0


def run_step_model(options: argparse.Namespace) -> int:
    export_step_model(
        options.artifacts,
        options.folder,
        options.accumulate,
        options.max_norm,
        optimizer=options.optimizer,
        checkpoint=load(options.checkpoint) if options.checkpoint else None,
        overwrite=options.overwrite,
    )
    for name in (MODEL, STATE):
        path = as_path(options.folder) / name
        print_line(f"{escaped(str(path))}: {format_bytes(path.stat().st_size)}")
    return 0


def run_executorch(options: argparse.Namespace) -> int:
    export_executorch(options.artifacts, options.file, largest=options.largest, overwrite=options.overwrite)
    path = as_path(options.file)
    print_line(f"{escaped(str(path))}: {format_bytes(path.stat().st_size)}")
    return 0

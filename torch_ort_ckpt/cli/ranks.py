"""The commands on partitioned sets: `merge` and `split`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..checkpoint.partition import PartitionPlan, split
from ..checkpoint.state import CheckpointState
from ..errors import CheckpointError
from ..formats import detect, format_for, load, merge, module, save
from ..storage.paths import PathLike
from .output import print_line, progress_bar
from .writing import contents, escaped, size_of, writing_options


def run_merge(options: argparse.Namespace) -> int:
    *ranks, destination = options.paths
    if not ranks:
        raise CheckpointError("merge needs ranks and a destination", remedy="torch-ort-ckpt merge RANKS... DST")
    target = options.to or format_for(destination)
    more = writing_options(options, target)
    state = merge(ranks if len(ranks) > 1 else ranks[0], stages=options.stages)
    with progress_bar("writing", sum(map(size_of, ranks))) as advance:
        save(
            state,
            destination,
            format=target,
            include_mixed_precision=options.mixed_precision,
            overwrite=options.overwrite,
            durable=not options.no_fsync,
            progress=advance,
            **more,
        )
    print_line(f"{escaped(destination)}: {target}, {contents(state)}")
    return 0


def run_split(options: argparse.Namespace) -> int:
    source = detect(options.source)
    target = options.to or (source if hasattr(module(source), "write") else "ort")
    plan = PartitionPlan.from_json(json_or_file(options.plan))
    ranks = split(load(options.source), plan)
    more = writing_options(options, target)
    written = save_ranks(ranks, options.destination, target, overwrite=options.overwrite, durable=not options.no_fsync, **more)
    print_line(f"{escaped(options.destination)}: {len(written)} ranks, {target}")
    return 0


def save_ranks(ranks: list[CheckpointState], folder: PathLike, format: str, *, overwrite: bool = False, **options: Any) -> list[Path]:
    """Save each rank as `<folder>/rank_<n>`, aliases included: a set that `load` takes as one."""
    place = Path(folder)
    suffix = next(iter(module(format).SUFFIXES), "")
    try:
        place.mkdir(parents=True, exist_ok=True)
        names = [f"rank_{rank}{suffix}" for rank in range(len(ranks))]
        foreign = sorted(set(os.listdir(place)) - set(names))
    except OSError as error:
        raise CheckpointError(
            f"can't be written ({error.strerror})", path=place, remedy="Choose a folder that you may write to."
        ) from error
    if foreign:
        raise CheckpointError(
            f"holds other files ({', '.join(foreign[:3])}), which would count as ranks", path=place, remedy="Choose an empty folder."
        )
    paths = [place / name for name in names]
    for rank, path in zip(ranks, paths, strict=True):
        save(rank, path, format=format, include_mixed_precision=True, overwrite=overwrite, **options)
    return paths


def json_or_file(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"not JSON ({error})", field="plan", remedy="For example --plan '{\"data_parallel_size\": 2}'.") from error

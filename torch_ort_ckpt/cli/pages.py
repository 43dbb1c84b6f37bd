"""`inspect --html`, `diff --html` and `checkpoints --html`: a page for a browser instead of tables."""

from __future__ import annotations

import argparse

from .. import report
from ..storage.paths import as_path, refuse_existing
from .output import print_line, progress_bar
from .writing import escaped, size_of


def write_inspection(options: argparse.Namespace) -> int:
    refuse_existing(as_path(options.html), options.overwrite)  # before the work, not after it
    with progress_bar("reading", size_of(options.path)) as advance:
        content = report.inspection(options.path, format=options.format, statistics=not options.no_stats, progress=advance)
    report.write(content, options.html, overwrite=options.overwrite)
    print_line(f"{escaped(options.html)}: {len(content['rows'])} tensors, open it in a browser")
    return 0


def write_comparison(options: argparse.Namespace) -> int:
    refuse_existing(as_path(options.html), options.overwrite)
    content, found = report.comparison(options.a, options.b, atol=options.atol, rtol=options.rtol)
    report.write(content, options.html, overwrite=options.overwrite)
    print_line(f"{escaped(options.html)}: {len(found)} of {found.compared} differ, open it in a browser")
    return 0 if found.equal else 1


def write_run(options: argparse.Namespace) -> int:
    refuse_existing(as_path(options.html), options.overwrite)
    with progress_bar("reading", sum(map(size_of, options.paths))) as advance:
        content = report.run_page(options.paths, progress=advance)
    report.write(content, options.html, overwrite=options.overwrite)
    print_line(f"{escaped(options.html)}: {len(content['rows'])} checkpoints, open it in a browser")
    return 1 if any(row["problems"] for row in content["rows"]) else 0

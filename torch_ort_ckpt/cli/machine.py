"""The commands on this machine rather than on a checkpoint: `doctor`."""

from __future__ import annotations

import argparse
import dataclasses

from .output import console, print_json, print_line, table
from .writing import escaped


def run_doctor(options: argparse.Namespace) -> int:
    from .. import __version__
    from .doctor import ABSENT, PROBLEM, examine

    checks = examine()
    problems = [check for check in checks if check.status == PROBLEM]
    if options.json:
        print_json({"version": __version__, "ok": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
        return 1 if problems else 0
    rows = [(check.area, check.name, check.status, check.detail) for check in checks]
    console().print(table(f"torch-ort-ckpt {__version__}", ("area", "what", "status", "detail"), rows))
    for title, status in (("To fix", PROBLEM), ("To add what is absent", ABSENT)):
        fixes = dict.fromkeys((check.fix, check.name) for check in checks if check.status == status and check.fix)
        if fixes:
            print_line(f"\n[bold]{title}[/]")
        for fix, name in fixes:
            print_line(f"  {escaped(name)}: {escaped(str(fix))}")
    return 1 if problems else 0

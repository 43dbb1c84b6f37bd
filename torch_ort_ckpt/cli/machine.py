"""The commands on this machine rather than on a checkpoint: `doctor`."""

from __future__ import annotations

import argparse
import dataclasses

from .output import console, print_json, print_line, table
from .writing import escaped


def run_doctor(options: argparse.Namespace) -> int:
    from .. import __version__
    from .doctor import ABSENT, PROBLEM, examine

    if options.cuda:
        return _run_cuda(options.json)
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


def _run_cuda(as_json: bool) -> int:
    """A table in Markdown, row by row as the results come: made to be pasted into an issue."""
    import torch

    from .. import __version__
    from ..errors import CheckpointError
    from . import cuda_check
    from .doctor import PROBLEM, Check

    if not torch.cuda.is_available():
        raise CheckpointError("no GPU: PyTorch finds no CUDA device, nothing was checked", remedy="`torch-ort-ckpt doctor` shows why.")
    device = torch.device("cuda", torch.cuda.current_device())
    environment = cuda_check.environment(device)
    checks: list[Check] = []
    if not as_json:
        for line in (f"torch-ort-ckpt {__version__}; {environment}", "", "| check | status | detail |", "|---|---|---|"):
            print_line(escaped(line))
    for check in cuda_check.examine(device):
        checks.append(check)
        if not as_json:
            print_line(escaped(f"| {check.name} | {check.status} | {check.detail.replace('|', '/')} |"))
    problems = any(check.status == PROBLEM for check in checks)
    if as_json:
        listed = [dataclasses.asdict(check) for check in checks]
        print_json({"version": __version__, "environment": environment, "ok": not problems, "checks": listed})
    else:
        print_line(f"\nFor accesses outside of memory: {escaped(cuda_check.SANITIZER)}")
    return 1 if problems else 0

"""What needs no tensors imports no torch: help, version, completion, wrong usage, and the import of the package itself."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from torch_ort_ckpt import catalog
from torch_ort_ckpt.cli import completion
from torch_ort_ckpt.cli import parser as cli_parser
from torch_ort_ckpt.dtypes import TORCH_FROM_ONNX, short_name

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "numpy", "rich", "safetensors", "h5py", "yaml", "xxhash", "shtab")


def _commands() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = (action for action in cli_parser.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(subparsers.choices)


def _imported(program: str, *arguments: str) -> set[str]:
    """Which of `HEAVY` a fresh interpreter has imported after the program, whose last line of output is the list."""
    program += f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


RUN = """
import contextlib, io, json, sys
from torch_ort_ckpt.cli import main
for arguments, expected in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    assert code == expected and out.getvalue(), (arguments, code, out.getvalue())
"""


def test_answers_without_tensors_import_nothing_heavy() -> None:
    calls: list[tuple[list[str], int]] = [(["--help"], 0), (["--version"], 0)]
    calls += [([name, "--help"], 0) for name in _commands()]
    calls += [([], 2), (["no-such-command"], 2), (["convert", "a", "b", "--to", "nothing"], 2), (["inspect"], 2)]
    assert _imported(RUN, json.dumps(calls)) == set()


def test_completion_imports_only_shtab() -> None:
    assert _imported(RUN, json.dumps([(["completion", shell], 0) for shell in completion.SHELLS])) == {"shtab"}


def test_an_error_before_reading_imports_no_torch() -> None:
    assert _imported(RUN, json.dumps([(["inspect", "s3://bucket/checkpoint"], 2)])) == {"rich"}


def test_a_command_does_import_torch() -> None:
    """Shows that the tests above would detect it."""
    assert {"torch", "numpy", "rich"} <= _imported(RUN, json.dumps([(["inspect", "no-such-file"], 2)]))


@pytest.mark.parametrize("name", ["torch_ort_ckpt", "torch_ort_ckpt.errors", "torch_ort_ckpt.catalog"])
def test_importing_imports_nothing_heavy(name: str) -> None:
    assert _imported(f"import {name}") == set()


def test_loading_imports_no_onnx() -> None:
    assert "onnx" not in _imported("import torch_ort_ckpt; torch_ort_ckpt.load")


def test_every_command_has_a_function() -> None:
    """The parser knows them by name only."""
    for name, parser in _commands().items():
        run = parser.get_default("run")
        if name != "completion":
            module, _, function = run.args[0].partition(".")
            imported = __import__(f"torch_ort_ckpt.cli.{module}", fromlist=[function])
            assert callable(getattr(imported, function)), name


def test_names_of_floating_point_types() -> None:
    floating = {short_name(dtype) for dtype in TORCH_FROM_ONNX.values() if dtype.is_floating_point}
    assert set(catalog.FLOAT_DTYPES.values()) == floating
    assert catalog.FLOAT_DTYPES["bf16"] == "bfloat16"
    assert TORCH_FROM_ONNX[16] is torch.bfloat16

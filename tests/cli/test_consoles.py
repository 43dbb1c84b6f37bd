"""Consoles and redirections that lack the characters of a name: cp1252, cp437, cp932, ASCII."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc

NAME = "weight_é_漢_😀"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("consoles") / "checkpoint"
    toc.save(toc.CheckpointState(trainable={NAME: torch.ones(2)}), place)
    return place


def command(*arguments: str, encoding: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "PYTHONUTF8": "0"}
    return subprocess.run([sys.executable, "-m", "torch_ort_ckpt", *arguments], capture_output=True, env=environment, check=False)


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "cp932", "ascii"])
def test_what_an_encoding_lacks_is_escaped(checkpoint: Path, encoding: str) -> None:
    done = command("inspect", os.fspath(checkpoint), encoding=encoding)
    assert done.returncode == 0, done.stderr
    expected = NAME.encode(encoding, "backslashreplace")
    assert expected in done.stdout


def test_an_error_about_such_a_name_is_exit_code_2(checkpoint: Path) -> None:
    """1 would mean "different"."""
    done = command("diff", os.fspath(checkpoint), os.fspath(checkpoint.with_name(NAME)), encoding="cp437")
    assert done.returncode == 2
    assert b"no such file" in done.stderr
    assert b"Traceback" not in done.stderr


def test_json_is_ascii(checkpoint: Path) -> None:
    done = command("inspect", "--json", os.fspath(checkpoint), encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert NAME in json.dumps(json.loads(done.stdout), ensure_ascii=False)

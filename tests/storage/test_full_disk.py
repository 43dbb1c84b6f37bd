"""Saves that the system refuses: full disks, size limits, folders without permission. The previous checkpoint stays, nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.writers import run, save_on_small_disk, save_or_say_why, save_with_size_limit, save_without_rights

pytestmark = pytest.mark.posix  # mounts, limits and rights of a POSIX system

UNSHARE = ["unshare", "-m" if getattr(os, "geteuid", int)() == 0 else "-rm"]
CAN_MOUNT = shutil.which("unshare") is not None and not subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]).returncode
TO = pytest.mark.parametrize("external", [False, True], ids=["to single", "to pair"])


@pytest.fixture(params=[False, True], ids=["from single", "from pair"])
def previous(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkpoint in a folder that other users can reach (pytest's own can't be)."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        path = Path(place, "folder", "checkpoint")
        path.parent.mkdir()
        toc.save(small(), path, external_data=request.param)
        yield path
        os.chmod(path.parent, 0o755)


def small() -> toc.CheckpointState:
    return toc.CheckpointState(trainable={"w": torch.arange(10.0)}, properties={"epoch": 3})


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def refused(function: object, path: Path, external: bool, reason: str, *args: object) -> None:
    """The save in another process fails for that reason, and the folder is as it was."""
    before = content(path.parent)
    answer = path.parent.with_name("answer")
    assert run(function, path, external, answer, *args) == 0
    kind, where, text = json.loads(answer.read_text())
    assert kind == "CheckpointError"
    assert where in (str(path), f"{path}.data")
    assert reason in text
    assert "what was there before is untouched" in text
    copy = path.parent.with_name("copy")
    place = copy if copy.exists() else path.parent
    assert content(place) == before
    assert toc.load(place / path.name) == small()


@TO
@pytest.mark.parametrize("limit", [1, 600, 4096, 300_000, 700_000])
def test_a_file_size_limit(limit: int, external: bool, previous: Path) -> None:
    refused(save_with_size_limit, previous, external, "File too large", limit)


@TO
@pytest.mark.parametrize("size", ["16k", "64k", "400k", "700k"] if CAN_MOUNT else [])
def test_a_full_disk(size: str, external: bool, previous: Path) -> None:
    """A real file system that is too small, where this user may mount one."""
    refused(save_on_small_disk, previous, external, "No space left on device", size)


@TO
def test_a_read_only_folder(external: bool, previous: Path) -> None:
    os.chmod(previous.parent, 0o555)
    refused(save_without_rights, previous, external, "Permission denied")


@TO
def test_a_folder_that_may_be_written_but_not_listed(external: bool, previous: Path) -> None:
    os.chmod(previous.parent, 0o333)
    answer = previous.parent.with_name("answer")
    assert run(save_without_rights, previous, external, answer) == 0
    os.chmod(previous.parent, 0o755)
    assert json.loads(answer.read_text())[0] is None, answer.read_text()
    assert toc.load(previous).step == 1


@TO
def test_what_stands_in_the_way(external: bool, tmp_path: Path) -> None:
    """Folders where the files should go, a file where the folder should be, no folder at all."""
    answer = tmp_path / "answer"
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "half.data").mkdir()
    for name, reason in (("folder", "Is a directory"), ("file/checkpoint", "Not a directory"), ("absent/checkpoint", "No such file")):
        save_or_say_why(tmp_path / name, external, answer)
        kind, where, text = json.loads(answer.read_text())
        assert kind in ("CheckpointError", "MissingFileError")
        assert where in (str(tmp_path / name), str(tmp_path / f"{name}.data"))
        assert reason in text
        os.unlink(answer)
    if external:
        save_or_say_why(tmp_path / "half", external, answer)
        assert json.loads(answer.read_text())[0] == "CheckpointError"
        os.unlink(answer)
        assert sorted(os.listdir(tmp_path)) == ["file", "folder", "half.data"]
    shutil.rmtree(tmp_path / "folder")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]

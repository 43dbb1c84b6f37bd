"""Disks that misbehave, for every format: the old or the new state loads, and an error is raised unless it is the new one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.disks import SOUND, TEXTS, VARIANTS, every_level, failing, many_datasets, outcome, prepare, short_writes, state
from tests.storage.test_full_disk import CAN_MOUNT
from tests.writers import run
from torch_ort_ckpt.storage.deferred import DeferredErrors
from torch_ort_ckpt.storage.files import atomic_write

pytestmark = [pytest.mark.posix, pytest.mark.filterwarnings("ignore::torch_ort_ckpt.CheckpointWarning")]
CASES = [*((variant, False) for variant in VARIANTS), *((variant, True) for variant in TEXTS)]
IDS = [f"{variant}{'-texts' if texts else ''}" for variant, texts in CASES]
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="may not mount a file system")


def run_levels(tmp_path: Path, variant: str, texts: bool, size: int, levels: int) -> list[tuple[int, str]]:
    folder, answer = tmp_path / "disk", tmp_path / "answer"
    folder.mkdir()
    assert run(every_level, folder, variant, size, texts, levels, answer) == 0  # a crash of a library would show here
    return [(pages, result) for pages, result in json.loads(answer.read_text())]


@needs_mount
@pytest.mark.parametrize(("variant", "texts"), CASES, ids=IDS)
def test_a_disk_with_too_little_room(variant: str, texts: bool, tmp_path: Path) -> None:
    found = run_levels(tmp_path, variant, texts, size=3000, levels=12)
    assert [(pages, result) for pages, result in found if result not in SOUND] == []
    assert found[0][1] == "old"
    assert found[-1][1] == "new"


@needs_mount
@pytest.mark.soak
@pytest.mark.parametrize("size", [700, 3000, 12000])
@pytest.mark.parametrize(("variant", "texts"), CASES, ids=IDS)
def test_a_disk_at_every_fill_level(variant: str, texts: bool, size: int, tmp_path: Path) -> None:
    found = run_levels(tmp_path, variant, texts, size, levels=0)
    assert [(pages, result) for pages, result in found if result not in SOUND] == []
    assert [pages for pages, _ in found] == list(range(len(found)))
    assert found[-1][1] == "new"


def unsound_failures(tmp_path: Path, variant: str, texts: bool, code: int, durable: bool) -> dict[str, set[str]]:
    """Let the first call of a save fail, then the second, ... and collect what should not have come of it, by the name of the call."""
    old, new = state(variant, 0, 700, texts), state(variant, 1, 700, texts)
    found: dict[str, set[str]] = {}
    outcome(prepare(tmp_path / "c", variant, old), variant, old, new)  # imports what is needed
    for number in range(1, 10_000):
        path = prepare(tmp_path / "c", variant, old)
        hit: list[str] = []
        result = outcome(path, variant, old, new, durable, failing(number, code, hit))
        if not hit:
            assert result == "new"
            assert number > 5
            return {name: results for name, results in found.items() if results}
        allowed = SOUND | {"new, with leftovers"}  # clearing up may fail too; the next save does it
        found.setdefault(hit[0], set()).update({result} - allowed)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_call_that_fails(variant: str, tmp_path: Path) -> None:
    assert unsound_failures(tmp_path, variant, False, errno.EIO, durable=True) == {}


@pytest.mark.soak
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOENT])
@pytest.mark.parametrize(("variant", "texts"), CASES, ids=IDS)
def test_each_call_fails_in_each_way(variant: str, texts: bool, code: int, durable: bool, tmp_path: Path) -> None:
    assert unsound_failures(tmp_path, variant, texts, code, durable) == {}


@pytest.mark.parametrize("limit", [37, 1000])
@pytest.mark.parametrize(("variant", "texts"), CASES, ids=IDS)
def test_short_writes_are_continued(variant: str, texts: bool, limit: int, tmp_path: Path) -> None:
    old, new = state(variant, 0, 700, texts), state(variant, 1, 700, texts)
    path = prepare(tmp_path / "c", variant, old)
    with short_writes(limit) as taken:
        assert outcome(path, variant, old, new) == "new"
    assert max(taken) == limit or variant == "dcp"  # PyTorch writes those files, through Python's buffers; ours is only the marker


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "dcp"])
def test_a_disk_that_takes_nothing_is_an_error(variant: str, tmp_path: Path) -> None:
    """A write that returns 0 again and again must not hang."""
    old, new = state(variant, 0, 700), state(variant, 1, 700)
    path = prepare(tmp_path / "c", variant, old)
    with short_writes(0) as taken:
        assert outcome(path, variant, old, new) == "old"
    assert taken


def test_an_hdf5_file_of_many_datasets(tmp_path: Path) -> None:
    assert run(many_datasets, tmp_path, tmp_path / "answer") == 0
    *failed, last = json.loads((tmp_path / "answer").read_text())
    assert set(failed) == {"old"}
    assert last == "new"


@pytest.mark.parametrize("fails_at", [1, 5, 40, 10**9])
def test_a_library_reads_back_what_it_wrote_after_an_error_too(fails_at: int, tmp_path: Path) -> None:
    rng = random.Random(fails_at)
    expected = bytearray(5000)
    with contextlib.suppress(toc.CheckpointError), atomic_write(tmp_path / "file") as below:
        file = DeferredErrors(below)
        with failing(fails_at, errno.ENOSPC, [], ("write", "lseek")):
            for _ in range(100):
                start, size = rng.randrange(4000), rng.randrange(1000)
                data = rng.randbytes(size)
                file.seek(start)
                assert file.write(data) == size
                expected[start : start + size] = data
                file.seek(start := rng.randrange(4000))
                assert file.read(900) == expected[start : start + 900]
                assert file.tell() == start + 900
        assert (file.error is None) == (fails_at > 1000)
        file.check()
    assert (tmp_path / "file").exists() == (fails_at > 1000)


def test_no_file_is_written_past_the_one_object() -> None:
    """Raw writes may be short. Only `storage.OutputFile` may use them; Python's buffered files are safe."""
    package = Path(toc.__file__).parent
    raw = re.compile(r"os\.(write|fdopen|pwrite|writev)\(|buffering=0")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if raw.search(path.read_text())}
    assert found == {"storage/buffers.py", "storage/files.py"}  # the first reads only
    assert "O_WRONLY" not in (package / "storage/buffers.py").read_text()


def test_any_file_we_write_may_be_written_in_pieces(tmp_path: Path) -> None:
    """Manifests, reports, sources: all go through the same file object."""
    text = bytes(range(256)) * 100
    with short_writes(999), atomic_write(tmp_path / "file") as file:
        assert file.write(text) == len(text)
        assert file.write(memoryview(text)[::2]) == len(text) // 2
        assert file.write(b"") == 0
    assert (tmp_path / "file").read_bytes() == text + text[::2]


def test_errors_are_ours_and_name_the_file(tmp_path: Path) -> None:
    with failing(5, errno.ENOSPC, []), pytest.raises(toc.CheckpointError, match="No space left on device") as caught:
        toc.save(state("ort", 0, 700), tmp_path / "c", durable=False)
    assert caught.value.path == str(tmp_path / "c")
    assert os.listdir(tmp_path) == []

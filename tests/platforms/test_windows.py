"""What Windows' users do most, under Windows' rules. Without the stand-in (`tox -e platforms`) and on other systems the tests hold too."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.formats import WRITABLE, module
from torch_ort_ckpt.storage import files, locks, system
from torch_ort_ckpt.training.preemption import Preemption

FORMATS = [name for name in WRITABLE if name != "onnx"]


def state(value: float) -> toc.CheckpointState:
    group = toc.OptimizerGroup(3, states={"w": {"momentum0": torch.full((8,), value), "momentum1": torch.ones(8)}})
    return toc.CheckpointState(trainable={"w": torch.full((8,), value)}, optimizer={"group0": group})


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_load_change_and_save_to_the_same_path(format: str, tmp_path: Path) -> None:
    if format == "ortcp":
        pytest.importorskip("h5py")
    path = tmp_path / f"checkpoint{next(iter(module(format).SUFFIXES), '')}"
    toc.save(state(0.0), path, format=format)
    before = names(tmp_path)
    loaded = toc.load(path, format=format)
    kept = loaded.trainable["w"]
    kept += 1.0
    toc.save(loaded, path, format=format)
    assert torch.equal(toc.load(path, format=format).trainable["w"], torch.ones(8))
    assert torch.equal(kept, torch.ones(8))
    assert names(tmp_path) == before


def test_a_pair_and_shards(tmp_path: Path) -> None:
    for name, options in (("checkpoint", {"external_data": True}), ("m.safetensors", {"max_shard_size": 48})):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        toc.save(state(0.0), folder / name, **options)
        before = names(folder)
        loaded = toc.load(folder / name)
        loaded.trainable["w"] += 1.0
        toc.save(loaded, folder / name, **options)
        assert torch.equal(toc.load(folder / name).trainable["w"], torch.ones(8))
        assert names(folder) == before


def test_diff_then_save(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(state(0.0), path)
    one, other = toc.load(path), toc.load(path)
    assert toc.diff(one, other).equal
    toc.save(state(1.0), path)
    assert float(toc.load(path).trainable["w"][0]) == 1.0


def test_what_killed_writers_left_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".checkpoint.77-0123abcd.tmp").write_bytes(b"half, of an older release")
    toc.save(state(0.0), tmp_path / "checkpoint")
    assert names(tmp_path) == {"checkpoint"}


def test_a_living_writer_keeps_its_temporary(tmp_path: Path) -> None:
    with files.pending_file(tmp_path / "checkpoint") as mine:
        mine.file.write(b"mine")
        toc.save(state(0.0), tmp_path / "checkpoint")
        assert mine.temporary.exists()
        mine.finish(durable=False)
        mine.commit(durable=False)
    assert (tmp_path / "checkpoint").read_bytes() == b"mine"
    assert names(tmp_path) == {"checkpoint"}


def test_a_folder_is_locked_once_a_thread(tmp_path: Path) -> None:
    with locks.directory_lock(tmp_path), locks.directory_lock(tmp_path):
        assert names(tmp_path) == ({locks.LOCK_FILE} if system.is_windows() else set())
    assert names(tmp_path) == set()


def test_a_lock_is_refused_to_others(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    first, second = (os.open(place, os.O_RDWR) for _ in range(2))
    assert locks.lock(first, wait=False) is locks.Lock.HELD
    assert locks.lock(second, wait=False) is locks.Lock.BUSY
    os.close(first)
    assert locks.lock(second, wait=True) is locks.Lock.HELD
    os.close(second)


def test_a_read_only_target_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(state(0.0), path)
    path.chmod(0o444)
    if system.is_windows():
        with pytest.raises(toc.CheckpointError, match="read-only"):
            toc.save(state(1.0), path)
    else:
        toc.save(state(1.0), path)
    assert names(tmp_path) == {"checkpoint"}
    path.chmod(0o644)


def test_an_entry_in_use_is_removed_later(tmp_path: Path) -> None:
    """Another program has it open: the save stands, and the next one removes the entry."""
    model = torch.nn.Linear(2, 2)
    manager = toc.CheckpointManager(tmp_path / "run", max_num_checkpoints=1)
    manager.save(1, model)
    entry = tmp_path / "run" / "checkpoint_1"
    with open(entry / "manifest.json", "rb"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.save(2, model)
    assert [warning for warning in caught if "is kept" in str(warning.message)] or not entry.exists()
    assert entry.exists() == system.is_windows()
    manager.save(3, model)
    assert [item.step for item in manager.list()] == [3]
    manager.close()


@pytest.mark.parametrize("name", ["a:b", "a?b", 'a"b', "a<b", "a*b", "a|b", "a\\b", "a/b"])
def test_names_that_windows_lacks_are_refused_everywhere(name: str, tmp_path: Path) -> None:
    odd = state(0.0)
    odd.optimizer[name] = odd.optimizer.pop("group0")
    with pytest.raises(toc.CheckpointError, match="file name"):
        toc.save(odd, tmp_path / "c", format="pbseq", groups="keep")
    assert names(tmp_path) == set()


def test_names_that_differ_in_case_are_refused_everywhere(tmp_path: Path) -> None:
    odd = state(0.0)
    odd.optimizer["GROUP0"] = odd.optimizer["group0"]
    with pytest.raises(toc.CheckpointError, match="where case is ignored"):
        toc.save(odd, tmp_path / "c", format="pbseq", groups="keep")


def test_a_path_beyond_260_characters_is_refused_with_the_reason(tmp_path: Path) -> None:
    """One that only the temporary beside it makes too long."""
    path = tmp_path / ("n" * 250)  # other systems allow names of 255
    with pytest.raises(toc.CheckpointError, match="260 characters" if system.is_windows() else "too long"):
        toc.save(state(0.0), path, format="ort")
    assert names(tmp_path) == set()


def test_the_parts_of_a_set_may_be_too_long_too(tmp_path: Path) -> None:
    """While a pair is put in place, its data has the longest name: 33 characters more than at the end."""
    path = tmp_path / ("n" * (239 - len(str(tmp_path))))
    if system.is_windows():
        with pytest.raises(toc.CheckpointError, match="260 characters"):
            toc.save(state(0.0), path, format="ort", external_data=True)
        assert names(tmp_path) == set()
    toc.save(state(0.0), path, format="ort")
    assert names(tmp_path) == {path.name}


def test_a_refused_file_can_be_deleted_at_once(tmp_path: Path) -> None:
    """While the error, and with it every variable of the functions it came through, is still there."""
    for format in FORMATS:
        if format == "ortcp":
            pytest.importorskip("h5py")
        path = tmp_path / f"{format}{next(iter(module(format).SUFFIXES), '')}"
        toc.save(state(0.0), path, format=format)
        places = [place for place in (path.iterdir() if path.is_dir() else [path]) if place.stat().st_size > 20]
        for place in places:
            os.truncate(place, place.stat().st_size // 2)
        with pytest.raises(toc.CheckpointError) as caught:
            toc.load(path, format=format)
        for place in places:
            place.unlink()
        assert caught.value.path


def test_upgrade_replaces_what_it_has_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(state(1.0), path, version=1)
    assert main(["upgrade", str(path), str(path), "--overwrite"]) == 0
    assert float(toc.load(path).trainable["w"][0]) == 1.0
    assert names(tmp_path) == {"checkpoint"}


@pytest.mark.parametrize("suffix", [".PT", ".Safetensors", ".ORTCP"])
def test_suffixes_in_any_case(suffix: str, tmp_path: Path) -> None:
    if suffix == ".ORTCP":
        pytest.importorskip("h5py")
    path = tmp_path / f"X{suffix}"
    toc.save(state(2.0), path)
    assert path.is_file()
    assert float(toc.load(path).trainable["w"][0]) == 2.0


def test_ctrl_break_stops_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGTERM + 0, raising=False)
    assert len(Preemption().numbers) == 2


def test_memory_that_cannot_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a system says that has no memory left, for the mapping and for reading."""
    from torch_ort_ckpt.storage import buffers

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    def full(_: int = 0) -> bytearray:
        if _:
            raise MemoryError
        return bytearray()

    path = tmp_path / "checkpoint"
    toc.save(state(0.0), path)
    monkeypatch.setattr(buffers._mmap, "mmap", refuse)
    monkeypatch.setattr(buffers, "bytearray", full, raising=False)
    with pytest.raises(toc.CheckpointError, match="do not fit in memory") as caught:
        buffers.FileBuffer(path)
    assert "mmap=True" not in str(caught.value)
    assert "paging file" in str(caught.value)

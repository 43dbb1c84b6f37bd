"""What a mapped checkpoint promises: nothing is read until touched, the file never changes, and the tensors outlive it."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.formats.hostile import checkpoint, module, official, tensor
from tests.truth import Truth, raw

pytestmark = pytest.mark.posix  # on Windows files are read, not mapped

MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["single", "pair"])
def big(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Eight tensors of 1 MiB, each full of its own number."""
    path = tmp_path / "checkpoint"
    tensors = {f"w{index}": torch.full((MIB // 4,), float(index)) for index in range(8)}
    toc.save(toc.CheckpointState(trainable=tensors), path, external_data=request.param)
    return path


def data_file(path: Path) -> Path:
    data = Path(f"{path}.data")
    return data if data.exists() else path


def resident(path: Path) -> dict[str, int]:
    """Bytes of this process's mappings of the file: how many are mapped, in memory, and private copies."""
    text = Path("/proc/self/smaps").read_text()
    totals = {"Size": 0, "Rss": 0, "Private_Dirty": 0}
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        if area.splitlines()[0].endswith(os.path.realpath(path)):
            for key in totals:
                totals[key] += int(re.search(rf"^{key}: +(\d+) kB", area, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    return totals


def test_nothing_is_read_until_touched(big: Path) -> None:
    state = toc.load(big)
    place = data_file(big)
    assert resident(place)["Size"] >= 8 * MIB
    # The loader looks at each tensor's length, and the kernel maps 64 KiB of its cache around that: some pages, not the tensors.
    untouched = resident(place)["Rss"]
    assert untouched <= 12 * (64 << 10)
    assert state.trainable["w3"].sum() == 3 * MIB // 4
    one = resident(place)["Rss"]
    assert MIB <= one <= MIB + untouched + (256 << 10)
    assert resident(place)["Private_Dirty"] == 0  # reading copies nothing


def test_writing_to_a_tensor_never_changes_the_file(big: Path) -> None:
    place = data_file(big)
    before = place.read_bytes()
    state = toc.load(big)
    state.trainable["w1"].fill_(-1)
    state.trainable["w2"][0] = 7
    assert MIB <= resident(place)["Private_Dirty"] <= MIB + (64 << 10)  # only the pages written to are copied
    again = toc.load(big)
    assert again.trainable["w1"].eq(1).all()
    assert again.trainable["w2"].eq(2).all()
    assert state.trainable["w1"].eq(-1).all()
    del state
    assert place.read_bytes() == before


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_outlive_the_file(big: Path, mmap: bool) -> None:
    replaced, deleted = toc.load(big, mmap=mmap), toc.load(big, mmap=mmap)
    toc.save(toc.CheckpointState(trainable={"other": torch.zeros(3)}), big, external_data=data_file(big) != big)
    assert all(value.eq(index).all() for index, value in enumerate(replaced.trainable.values()))
    shutil.rmtree(big.parent)
    assert all(value.eq(index).all() for index, value in enumerate(deleted.trainable.values()))
    assert replaced == deleted


def test_a_tensor_outlives_its_state(big: Path) -> None:
    kept = toc.load(big).trainable["w5"]
    view = kept[10:20].reshape(2, 5)
    del kept
    gc.collect()
    assert view.eq(5).all()
    assert resident(data_file(big))["Size"] >= 8 * MIB
    del view
    gc.collect()
    assert resident(data_file(big))["Size"] == 0


def test_without_a_mapping_an_overwrite_in_place_does_no_harm(big: Path) -> None:
    """ORT overwrites its files in place."""
    state = toc.load(big, mmap=False)
    mapped = toc.load(big)
    place = data_file(big)
    with open(place, "r+b") as file:
        file.write(b"\xff" * os.path.getsize(place))
    assert all(value.eq(index).all() for index, value in enumerate(state.trainable.values()))
    assert resident(place)["Size"] >= 8 * MIB  # the mapped one; its tensors are now whatever was written
    assert mapped.trainable["w1"].view(torch.uint8).eq(0xFF).all()
    os.truncate(place, 0)
    assert all(value.eq(index).all() for index, value in enumerate(state.trainable.values()))


@pytest.mark.parametrize("external", [False, True], ids=["to single", "to pair"])
def test_a_state_can_be_saved_onto_the_file_it_is_mapped_from(big: Path, external: bool) -> None:
    state = toc.load(big)
    state.trainable["w0"].fill_(9)
    state.properties["round"] = 2
    for _ in range(3):
        toc.save(state, big, external_data=external)
        again = toc.load(big)
        assert again == state
        state = again
    assert [float(value[0]) for value in state.trainable.values()] == [9, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("mmap", [True, False])
def test_misaligned_data_is_copied(mmap: bool, tmp_path: Path) -> None:
    """ORT aligns raw data to 4 bytes only, so that an int64 tensor can start in the middle of a word."""
    path = tmp_path / "checkpoint"
    numbers = torch.arange(5)
    seen = set()
    for shift in range(0, 8, 4):
        # the name before it moves the data
        fields = module([tensor(b"x" * (1 + shift), (5,), raw(numbers), 7)])
        path.write_bytes(official(checkpoint(fields)))
        position = path.read_bytes().index(raw(numbers))
        seen.add(position % 8)
        value = next(iter(toc.load(path, mmap=mmap).trainable.values()))
        assert value.equal(numbers)
        assert value.data_ptr() % 8 == 0
    assert 4 in seen


def test_aligned_tensors_alias_one_mapping(big: Path) -> None:
    state = toc.load(big)
    addresses = [value.data_ptr() for value in state.trainable.values()]
    assert {after - before for before, after in itertools.pairwise(addresses)} <= {MIB, MIB + 64}
    assert all(address % 64 == 0 for address in addresses)


def test_descriptors_and_mappings_do_not_leak(big: Path, request: pytest.FixtureRequest) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()  # nothing here may wait for it
    request.addfinalizer(gc.enable)
    before = descriptors()
    for index in range(1000):
        state = toc.load(big, mmap=index % 4 != 0)
        if index % 100 == 0:
            toc.save(state, big.with_name("copy"), external_data=index % 200 == 0, durable=False)
    assert descriptors() == before + len(state._buffers)  # a mapping holds a duplicate of its descriptor
    del state
    assert descriptors() == before
    assert resident(data_file(big))["Size"] == 0


def test_refused_files_leak_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    broken = tmp_path / "broken"
    broken.write_bytes(Truth("fbv2_ort1_19_2_adamw_full").checkpoint.read_bytes()[:-2000])
    os.mkdir(tmp_path / "folder")
    os.mkfifo(tmp_path / "fifo")
    for _ in range(100):
        for name in ("broken", "folder", "fifo", "absent"):
            with pytest.raises(toc.CheckpointError):
                toc.load(tmp_path / name, format="ort")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before

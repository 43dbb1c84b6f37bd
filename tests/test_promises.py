"""What README.md and SECURITY.md promise, one test each. The tests of the parts go further; these say that the whole keeps its word."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import torch_ort_ckpt as toc
from tests.traps import Trap
from tests.truth import DATA, raw
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.formats import WRITABLE

REAL = DATA / "fbv2_ort1_19_2_adamw_full" / "checkpoint"
ARTIFACTS = DATA / "fbv2_ort1_19_2_adamw_full"
NAMES = dict.fromkeys(WRITABLE, "ck") | {"safetensors": "ck.safetensors", "torch": "ck.pt", "ortcp": "ck.ortcp", "dcp": "ck.dcp"}


@pytest.mark.parametrize("name", [name for name in WRITABLE if name != "onnx"])
@pytest.mark.filterwarnings("ignore::torch_ort_ckpt.CheckpointWarning")
def test_load_of_save_is_the_state_bit_for_bit(name: str, tmp_path: Path) -> None:
    if name == "ortcp":
        pytest.importorskip("h5py")
    state = toc.load(REAL)
    toc.save(state, tmp_path / NAMES[name], format=name)
    found = toc.load(tmp_path / NAMES[name])
    for key, value in state.parameters.items():
        assert found.parameters[key].dtype == value.dtype
        assert raw(found.parameters[key]) == raw(value)
    (group,), (again,) = state.optimizer.values(), found.optimizer.values()
    assert again.step == group.step
    for key, moments in group.states.items():
        for moment, value in moments.items():
            assert raw(again.states[key][moment]) == raw(value)


WITHOUT = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("onnxruntime", "h5py", "lightning", "pytorch_lightning", "onnxscript"):
            raise ImportError(name + " must not be needed")
sys.meta_path.insert(0, Blocked())
import torch_ort_ckpt as toc
source, target = sys.argv[1:]
toc.convert(source, target)
assert toc.diff(source, target).equal
"""


def test_converting_needs_no_onnxruntime(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT, str(REAL), str(tmp_path / "model.safetensors")], check=True, timeout=240)


def test_nothing_from_a_file_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save({"state_dict": {"w": torch.ones(2)}, "more": Trap(mark)}, tmp_path / "torch.pt")
    torch.save({"model": {"w": torch.ones(2)}, "more": Trap(mark)}, tmp_path / "rank.ort.pt")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    (tmp_path / "plain").write_bytes(pickle.dumps(Trap(mark)))
    for name in ("torch.pt", "rank.ort.pt", "folder", "plain"):
        for use in (toc.load, toc.detect, toc.verify):
            try:
                use(tmp_path / name)
            except toc.CheckpointError:
                continue  # refused: good
        assert main(["inspect", str(tmp_path / name)]) in (0, 2)
    assert not mark.exists()
    os.rmdir(pickle.loads(pickle.dumps(Trap(mark))) or mark)  # the pickle does work where somebody unpickles it


def test_restore_checks_every_byte(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    for step in (1, 2):
        toc.CheckpointManager(tmp_path / "run").save(step, model)
    entry = tmp_path / "run" / "checkpoint_2"
    generator = torch.Generator().manual_seed(0)
    for file in sorted(place for place in entry.iterdir() if place.is_file() and place.stat().st_size and not place.name.startswith(".")):
        whole = file.read_bytes()
        places = range(len(whole)) if len(whole) < 40 else torch.randint(0, len(whole), (40,), generator=generator).tolist()
        for place in places:
            file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
            with pytest.warns(toc.CheckpointWarning):
                found = toc.CheckpointManager(tmp_path / "run").restore(model)
            assert found is not None
            assert found.step == 1, (file.name, place)
        file.write_bytes(whole)
    assert toc.CheckpointManager(tmp_path / "run").restore(model).step == 2


@pytest.mark.parametrize("engine", [pytest.param("ort", marks=pytest.mark.ort), "torch"])
def test_a_result_handed_out_never_changes(engine: str) -> None:
    model = toc.OrtModule(ARTIFACTS, engine=engine)
    optimizer = toc.OrtOptimizer(model, lr=0.1)
    width = int(model.artifacts.inputs[0].shape[1])
    kept, seen = [], []
    for step, size in enumerate((4, 4, 2, 4)):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(size, width, generator=generator), torch.zeros(size, dtype=torch.int64)
        for loss in (model(x, y), model.train_step(x, y), model.eval()(x, y)):
            loss = loss[0] if isinstance(loss, (tuple, list)) else loss
            kept.append(loss.detach())
            seen.append(float(loss))
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    assert [float(loss) for loss in kept] == seen
    assert len(set(seen)) > 3


def test_an_existing_destination_needs_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "there"
    target.write_bytes(b"mine")
    source = str(REAL)
    for command in (
        ["convert", source, target],
        ["upgrade", source, target],
        ["average", source, source, "-o", target],
    ):
        assert main([str(word) for word in command]) == 2
        assert "overwrite" in capsys.readouterr().err
        assert target.read_bytes() == b"mine"


def test_only_what_we_made_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    theirs = [run / "checkpoint_1", run / ".checkpoint_5.mine.old", run / ".checkpoint_7.123-0123abcd.tmp", run / "checkpoint_3"]
    for folder in theirs:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", toc.CheckpointWarning)  # it says that these folders stay
        manager = toc.CheckpointManager(run, max_num_checkpoints=1)
        for step in (10, 20, 30):
            manager.save(step, torch.nn.Linear(2, 2))
    assert [entry.step for entry in manager.list() if entry.problem is None] == [30]
    assert all((folder / "notes.txt").read_text() == "mine" for folder in theirs)


def test_mapped_tensors_outlive_their_file_and_never_change_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copy(REAL, path)
    before = path.read_bytes()
    state = toc.load(path)
    name, value = next(iter(state.trainable.items()))
    expected = toc.load(REAL).trainable[name].clone()
    value.add_(1)
    assert path.read_bytes() == before
    os.rename(path, tmp_path / "elsewhere")
    os.unlink(tmp_path / "elsewhere")
    assert torch.equal(value, expected + 1)


def test_exit_codes_are_0_done_1_different_2_an_error(tmp_path: Path) -> None:
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(2)}), tmp_path / "a")
    toc.save(toc.CheckpointState(trainable={"w": torch.zeros(2)}), tmp_path / "b")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "missing")]) == 2


def test_names_from_files_reach_the_terminal_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toc.save(toc.CheckpointState(trainable={"w\x1b[31m\x07": torch.ones(2)}), tmp_path / "a")
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(2)}), tmp_path / "b")
    main(["inspect", str(tmp_path / "a")])
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    shown = "".join(capsys.readouterr()) + str(toc.diff(tmp_path / "a", tmp_path / "b"))
    assert not {"\x1b", "\x07"} & set(shown)


def test_an_average_of_broken_numbers_is_refused(tmp_path: Path) -> None:
    toc.save(toc.CheckpointState(trainable={"w": torch.ones(2)}), tmp_path / "a")
    toc.save(toc.CheckpointState(trainable={"w": torch.tensor([1.0, float("nan")])}), tmp_path / "b")
    with pytest.raises(toc.CheckpointError, match=r"b.*w"):
        toc.average([tmp_path / "a", tmp_path / "b"])


def test_a_manifest_is_covered_by_a_hash(tmp_path: Path) -> None:
    toc.CheckpointManager(tmp_path).save(2, torch.nn.Linear(2, 2), metrics={"loss": 0.5})
    manifest = tmp_path / "checkpoint_2" / "manifest.json"
    whole = json.loads(manifest.read_text())
    for key in whole:
        changed = dict(whole)
        if isinstance(changed[key], (int, float)):
            changed[key] = changed[key] + 4
        else:
            continue
        manifest.write_text(json.dumps(changed))
        assert toc.CheckpointManager(tmp_path).latest() is None, key
    manifest.write_text(json.dumps(whole))
    assert toc.CheckpointManager(tmp_path).latest().step == 2

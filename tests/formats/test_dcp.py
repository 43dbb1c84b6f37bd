"""`dcp`: torch.distributed.checkpoint folders of ours and of others, the Stateful protocol, and what a hostile index can't do."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import torch_ort_ckpt as toc
from tests.strategies import states
from tests.training.setups import assert_equal, data_for, graph, plain
from tests.truth import DATA


def trained(make: Any = plain) -> Any:
    setup = make()
    for batch in data_for(setup):
        setup.loss(batch).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return setup


def test_a_real_checkpoint_goes_there_and_back(tmp_path: Path) -> None:
    state = toc.load(DATA / "fbv2_ort1_19_2_adamw_full" / "checkpoint")
    toc.save(state, tmp_path / "c.dcp", format="dcp")
    assert toc.detect(tmp_path / "c.dcp") == "dcp"
    assert toc.load(tmp_path / "c.dcp") == state
    toc.save(state, tmp_path / "c.dcp", format="dcp")  # in the place of the first
    assert [place.name for place in tmp_path.iterdir()] == ["c.dcp"]


@given(state=states(several_groups=True))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_state_survives(state: toc.CheckpointState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        toc.save(state, Path(folder) / "c", format="dcp", include_mixed_precision=True, durable=False)
        assert toc.load(Path(folder) / "c") == state


def test_pytorch_reads_what_we_write(tmp_path: Path) -> None:
    state = toc.load(DATA / "fbv2_ort1_19_2_adamw_full" / "checkpoint")
    toc.save(state, tmp_path / "c", format="dcp")
    wanted = {"model": {name: torch.empty_like(value) for name, value in state.parameters.items()}}
    dcp.load(wanted, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_equal(wanted["model"], dict(state.parameters))


def test_we_read_what_pytorch_writes(tmp_path: Path) -> None:
    setup = trained()
    model, optimizer = get_state_dict(setup.model, setup.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.warns(toc.CheckpointWarning, match="not tensors"):
        state = toc.load(tmp_path / "c")
    assert_equal(dict(state.parameters), setup.model.state_dict())
    other = plain(4)
    other.model.load_state_dict(toc.to_state_dict(state))
    assert state.optimizer["group0"].step == 10
    first = next(iter(setup.optimizer.state.values()))
    assert torch.equal(state.optimizer["group0"].states["0.weight"]["momentum0"], first["exp_avg"])


@pytest.mark.ort
def test_module_and_optimizer_are_stateful(tmp_path: Path) -> None:
    setup = trained(graph)
    assert isinstance(setup.model, Stateful)
    assert isinstance(setup.optimizer, Stateful)
    dcp.save({"model": setup.model, "optimizer": setup.optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    other = trained(graph)  # DCP fills the tensors that are there: the optimizer must have taken a step
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    dcp.load({"model": other.model, "optimizer": other.optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert other.model.checkpoint(other.optimizer) == setup.model.checkpoint(setup.optimizer)


class Exploit:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code from a file ran')",)


def test_nothing_in_the_index_is_executed(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(toc.CheckpointError, match=r"refers to builtins\.exec"):
        toc.load(tmp_path)


@pytest.mark.parametrize("damage", ["cut index", "cut data", "lost data", "empty index"])
def test_damage_is_an_error_that_names_the_place(damage: str, tmp_path: Path) -> None:
    toc.save(toc.load(DATA / "fbv2_ort1_19_2_adamw_full" / "checkpoint"), tmp_path / "c", format="dcp")
    index, data = tmp_path / "c" / ".metadata", next((tmp_path / "c").glob("*.distcp"))
    if damage == "cut index":
        index.write_bytes(index.read_bytes()[:100])
    elif damage == "empty index":
        index.write_bytes(b"")
    elif damage == "cut data":
        data.write_bytes(data.read_bytes()[:200])
    else:
        data.unlink()
    with pytest.raises(toc.CheckpointError, match=str(tmp_path)):
        toc.load(tmp_path / "c")


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(toc.CheckpointError, match="files that are not part of a checkpoint"):
        toc.save(toc.CheckpointState({"w": torch.ones(2)}), tmp_path / "mine", format="dcp")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert [place.name for place in tmp_path.iterdir()] == ["mine"]

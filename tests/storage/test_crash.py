"""A writer killed with SIGKILL at every step of a save, and at random moments: the checkpoint is the old one or the new one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_ort_ckpt as toc
from tests import writers
from tests.writers import forkserver, new, old, repair_and_die, reshuffled, run, save_and_die, save_forever, shuffled
from torch_ort_ckpt.formats.ort import sidecar
from torch_ort_ckpt.formats.safetensors import checkpoint as safetensors

pytestmark = pytest.mark.posix  # SIGKILL

NEVER = 1 << 30
SCENARIOS = {
    "single over single": (False, False),
    "pair over pair": (True, True),
    "pair over single": (False, True),
    "single over pair": (True, False),
}


def killed_at_every_step(
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    check: Callable[[Path], bool],
    states: tuple[Callable[[], toc.CheckpointState], Callable[[], toc.CheckpointState]] = (old, new),
) -> list[bool]:
    """Kill a save at its first step, its second, ... until one gets through; what `check` said after each kill."""
    template = tmp_path / "template"
    template.mkdir()
    toc.save(states[0](), template / "checkpoint", **before)
    outcomes = []
    for step in range(1, NEVER):
        folder = tmp_path / f"{step}"
        shutil.copytree(template, folder)
        code = run(save_and_die, folder / "checkpoint", after, step, tmp_path / "journal", states[1])
        outcomes.append(check(folder / "checkpoint"))
        shutil.rmtree(folder)
        if code == 0:
            return outcomes
        assert code == -signal.SIGKILL
    raise AssertionError("unreachable")


def is_new(path: Path) -> bool:
    return writers.is_new(path, sidecar.repair)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_step(scenario: str, tmp_path: Path) -> None:
    def check(path: Path) -> bool:
        found = is_new(path)
        toc.save(new(), path, external_data=SCENARIOS[scenario][1])  # clears up what the killed one left
        assert set(os.listdir(path.parent)) == ({"checkpoint", "checkpoint.data"} if SCENARIOS[scenario][1] else {"checkpoint"})
        return found

    before, after = ({"external_data": external} for external in SCENARIOS[scenario])
    outcomes = killed_at_every_step(tmp_path, before, after, check)
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # old until the commit, new ever after
    assert outcomes[0] is False
    assert outcomes[-1] is True


@pytest.mark.ort
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "pair" in name])
def test_ort_reads_what_a_killed_save_left(scenario: str, tmp_path: Path) -> None:
    """Before `repair` ORT may find data of another save (it can't tell); after it, never."""
    import numpy as np
    from onnxruntime.training.api import CheckpointState

    def seen_by_ort(path: Path) -> bool:
        sidecar.repair(path)
        theirs = CheckpointState.load_checkpoint(path)
        expected = new() if theirs.properties["epoch"] else old()
        assert {name for name, _ in theirs.parameters} == set(expected.parameters)
        for name, parameter in theirs.parameters:
            assert np.array_equal(parameter.data, expected.parameters[name].numpy())
        return bool(theirs.properties["epoch"])

    before, after = ({"external_data": external} for external in SCENARIOS[scenario])
    outcomes = killed_at_every_step(tmp_path, before, after, seen_by_ort)
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] is True


ONE = {"format": "safetensors", "durable": False}
MANY = {**ONE, "max_shard_size": 4800}


@pytest.mark.parametrize(("before", "after"), [(ONE, ONE), (MANY, MANY), (ONE, MANY), (MANY, ONE)], ids=["1-1", "n-n", "1-n", "n-1"])
def test_killed_at_every_step_of_a_set_of_safetensors(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    def check(path: Path) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)
            found = toc.load(path)
        assert found in (old(), new())
        safetensors.repair(path)
        assert toc.load(path) == found
        return found == new()

    outcomes = killed_at_every_step(tmp_path, before, after, check)
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (False, True)


PAIR = {"external_data": True, "durable": False}
SETS = {"pair": PAIR, "sharded": MANY, "with optimizer": ONE}


@pytest.mark.parametrize("kind", SETS)
def test_killed_between_saves_of_the_same_numbers_in_another_order(kind: str, tmp_path: Path) -> None:
    """A sum over the content can't tell the two sets apart: a kill between their renames must not mix them, nor may `verify --repair`."""
    assert_never_mixed(tmp_path, SETS[kind], SETS[kind], (shuffled, reshuffled))


KINDS = {
    "ort": {"single": {"durable": False}, "pair": PAIR},
    "safetensors": {"one": ONE, "many": MANY, "very many": {**ONE, "max_shard_size": 1}},
}
WAYS = [(before, after) for kinds in KINDS.values() for before in kinds.items() for after in kinds.items()]


@pytest.mark.soak
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("states", [(shuffled, reshuffled), (old, new), (reshuffled, old)], ids=lambda states: states[0].__name__)
@pytest.mark.parametrize(("before", "after"), WAYS, ids=[f"{before[0]} to {after[0]}" for before, after in WAYS])
def test_killed_at_every_step_from_every_kind_to_every_kind(
    before: tuple[str, Any], after: tuple[str, Any], states: tuple[Any, Any], durable: bool, tmp_path: Path
) -> None:
    assert_never_mixed(tmp_path, before[1], {**after[1], "durable": durable}, states)


def assert_never_mixed(
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    states: tuple[Callable[[], toc.CheckpointState], Callable[[], toc.CheckpointState]],
) -> None:
    first, second = states[0](), states[1]()

    def check(path: Path) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)  # "the last save was interrupted"
            found = toc.load(path, mmap=False)
            assert found in (first, second)
            assert toc.verify(path, repair=True)
        assert toc.load(path) == found  # and no warning now
        toc.save(second, path, **after)
        assert toc.load(path) == second
        assert not [name for name in os.listdir(path.parent) if name.startswith(".")]
        return found == second

    outcomes = killed_at_every_step(tmp_path, before, after, check, states)
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (False, True)


def test_repair_keeps_a_set_that_an_older_version_left_beside_another_of_the_same_identity(tmp_path: Path) -> None:
    """Older versions identified sets by sums. What is in place is never exchanged, and loading says that there are two."""
    path = tmp_path / "checkpoint"
    toc.save(shuffled(), path, external_data=True)
    identity = (tmp_path / "checkpoint").read_bytes()[-64:].strip(b"\0").decode().removeprefix("TOCPAIR1")
    data = Path(f"{path}.data").read_bytes()
    other = data[:64][::-1] + data[64:]
    Path(f"{path}.data.{identity}").write_bytes(other)
    with pytest.warns(toc.CheckpointWarning, match="both claim to belong to it, but differ"):
        assert not toc.verify(path, repair=True).repaired
    with pytest.warns(toc.CheckpointWarning, match="both claim"):
        assert toc.load(path) == shuffled()
    Path(f"{path}.data.{identity}").write_bytes(data)  # the same bytes: nothing to warn of, and repair clears it away
    assert toc.load(path) == shuffled()
    assert toc.verify(path, repair=True).repaired
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "checkpoint.data"]


def test_repair_itself_may_be_killed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for step in range(1, NEVER):
        toc.save(old(), path, external_data=True)
        toc.save(new(), tmp_path / "other", external_data=True)
        identity = (tmp_path / "other").read_bytes()[-64:].strip(b"\0").decode().removeprefix("TOCPAIR1")
        os.replace(tmp_path / "other.data", f"{path}.data.{identity}")
        os.replace(tmp_path / "other", path)  # as if killed between the renames
        code = run(repair_and_die, path, step, tmp_path / "journal")
        assert is_new(path)
        if code == 0:
            break
    assert step > 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_random_moments(scenario: str, tmp_path: Path) -> None:
    rng = random.Random(scenario)
    path = tmp_path / "checkpoint"
    before, after = SCENARIOS[scenario]
    toc.save(old(), path, external_data=before)
    for _ in range(20):
        receiver, sender = forkserver.Pipe(duplex=False)
        process = forkserver.Process(target=save_forever, args=(path, (after, before), sender))
        process.start()
        receiver.recv()
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        is_new(path)


@pytest.mark.parametrize("external", [False, True])
def test_bytes_reach_the_medium_before_their_names(external: bool, tmp_path: Path) -> None:
    """What a power failure needs: each file is synced after its last write and before its rename, the folder after each rename."""
    path = tmp_path / "folder" / "checkpoint"
    path.parent.mkdir()
    assert run(save_and_die, path, {"external_data": external}, NEVER, tmp_path / "journal") == 0
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    renames = [index for index, entry in enumerate(journal) if entry[0] == "replace"]
    assert len(renames) == (3 if external else 1)
    last_write = max(index for index, entry in enumerate(journal) if "write" in entry[0])
    synced = {entry[1]: index for index, entry in enumerate(journal) if entry[0] == "fsync" and entry[1] != str(path.parent)}
    sources = {journal[index][1] for index in renames if journal[index][1].endswith(".tmp")}
    assert synced.keys() == sources
    assert all(last_write < index < renames[0] for index in synced.values())
    assert [journal[index + 2][:2] for index in renames] == [["fsync", str(path.parent)]] * len(renames)

"""Readers and writers of one checkpoint at the same time: everyone sees a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import torch_ort_ckpt as toc
from tests.storage.test_crash import SCENARIOS, is_new
from tests.writers import forkserver, new, old, save_forever, save_many


def start_writer(path: Path, kinds: tuple[bool, bool]) -> BaseProcess:
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=save_forever, args=(path, kinds, sender))
    process.start()
    receiver.recv()
    return process


@pytest.mark.posix  # on Windows a save waits a second for readers to close the file, and these never pause
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_reader_beside_a_writer(scenario: str, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(old(), path, external_data=SCENARIOS[scenario][0])
    writer = start_writer(path, SCENARIOS[scenario][::-1])
    seen: set[object] = set()
    loads = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)
            while loads < 150 or seen != {0, 1}:
                state = toc.load(path, mmap=mmap)
                assert state in (old(), new())
                seen.add(state.properties["epoch"])
                loads += 1
                assert writer.is_alive()
    finally:
        writer.kill()
        writer.join()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_writers(scenario: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writers = []
    for kinds in (SCENARIOS[scenario], SCENARIOS[scenario][::-1]):
        ours, theirs = forkserver.Pipe()
        process = forkserver.Process(target=save_many, args=(path, kinds, 60, theirs))
        process.start()
        ours.recv()
        writers.append((process, ours))
    for _, pipe in writers:  # now that both are there
        pipe.send(None)
    for process, _ in writers:
        process.join()
    assert [process.exitcode for process, _ in writers] == [0, 0]  # neither failed because of the other
    is_new(path)

"""Readers and writers of one checkpoint at the same time: everyone sees a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import torch_ort_ckpt as toc

from .test_crash import SCENARIOS, is_new
from .writers import forkserver, new, old, save_forever


def start_writer(path: Path, kinds: tuple[bool, bool]) -> BaseProcess:
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=save_forever, args=(path, kinds, sender))
    process.start()
    receiver.recv()
    return process


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_reader_beside_a_writer(scenario: str, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    toc.save(old(), path, external_data=SCENARIOS[scenario][0])
    writer = start_writer(path, SCENARIOS[scenario][::-1])
    seen: set[object] = set()
    give_up = time.monotonic() + 60
    loads = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", toc.CheckpointWarning)
            while loads < 150 or seen != {0, 1}:
                state = toc.load(path, mmap=mmap)
                assert state in (old(), new())
                seen.add(state.properties["epoch"])
                loads += 1
                assert time.monotonic() < give_up, "the writer does not write"
    finally:
        writer.kill()
        writer.join()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_writers(scenario: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writers = [start_writer(path, kinds) for kinds in (SCENARIOS[scenario], SCENARIOS[scenario][::-1])]
    time.sleep(0.5)
    alive = [writer.is_alive() for writer in writers]
    for writer in writers:
        writer.kill()
        writer.join()
    assert alive == [True, True]  # neither failed because of the other
    is_new(path)

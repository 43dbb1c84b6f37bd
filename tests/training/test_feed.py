"""`Feed` and `ResumableSampler`: every sample once, on any number of ranks, from any position on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import torch_ort_ckpt as toc
from tests.training.setups import data
from torch_ort_ckpt.training.feed import Feed
from torch_ort_ckpt.training.sampler import ResumableSampler


@given(length=st.integers(1, 60), ranks=st.integers(1, 5), epoch=st.integers(0, 3), shuffle=st.booleans(), drop=st.booleans())
def test_ranks_share_the_data_set(length: int, ranks: int, epoch: int, shuffle: bool, drop: bool) -> None:
    parts = []
    for rank in range(ranks):
        sampler = ResumableSampler(length, shuffle=shuffle, drop_last=drop, rank_=rank, ranks=ranks)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(sampler) == len(parts[-1])
    assert len({len(part) for part in parts}) == 1
    drawn = [index for part in parts for index in part]
    if drop:
        assert len(set(drawn)) == len(drawn) == length // ranks * ranks
    else:
        assert set(drawn) == set(range(length))
        assert len(drawn) < length + ranks


@given(data=st.data(), length=st.integers(8, 60), before=st.integers(1, 4), after=st.integers(1, 4))
def test_another_number_of_ranks_draws_the_rest(data: st.DataObject, length: int, before: int, after: int) -> None:
    rounds = data.draw(st.integers(0, length // before))
    done = [i for rank in range(before) for i in itertools.islice(ResumableSampler(length, rank_=rank, ranks=before), rounds)]
    rest = []
    for rank in range(after):
        sampler = ResumableSampler(length, rank_=rank, ranks=after)
        sampler.set_epoch(0, rounds * before)
        rest += list(sampler)
    assert set(done) | set(rest) == set(range(length))
    assert len(rest) - (length - len(done)) < after
    assert not set(done) & set(rest) or len(rest) > length - len(done)  # only the filling repeats


def test_epochs_differ_and_repeat() -> None:
    sampler = ResumableSampler(20, seed=4)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


LOADERS = {
    "shuffled": lambda: data(),
    "in order": lambda: data(shuffle=False),
    "resumable": lambda: data(shuffle=None, sampler=ResumableSampler(40, seed=2)),
    "workers": lambda: data(num_workers=1),
    "odd end": lambda: data(batch_size=7),
    "resumable, odd end": lambda: data(batch_size=7, shuffle=None, sampler=ResumableSampler(40, seed=2)),
}


@pytest.mark.parametrize("stop", [0, 1, 4, 10, 13])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_feed_goes_on_where_it_was(kind: str, stop: int) -> None:
    torch.manual_seed(0)
    feed = Feed(LOADERS[kind]())
    for _ in range(stop):
        next(feed)
    state, generator = feed.state_dict(), torch.get_rng_state()
    expected = [next(feed)[0] for _ in range(15)]
    end = torch.get_rng_state()
    torch.manual_seed(77)
    other = Feed(LOADERS[kind]())
    other.load_state_dict(state)
    assert other.state_dict()["samples"] == state["samples"]
    torch.set_rng_state(generator)
    found = [next(other)[0] for _ in range(15)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(torch.get_rng_state(), end)
    assert (other.epoch, other.samples) == (feed.epoch, feed.samples)


def test_a_loader_that_keeps_its_own_position_does_so() -> None:
    class Counting:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while self.at < 10:
                self.at += 1
                yield torch.tensor([self.at])
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    feed = Feed(Counting())
    taken = [int(next(feed)) for _ in range(13)]
    assert taken[-1] == 3
    other = Feed(Counting())
    other.load_state_dict(feed.state_dict())
    assert (int(next(other)), other.epoch, other.batch) == (4, 1, 4)


def test_an_empty_loader_is_an_error_not_an_endless_loop() -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(toc.CheckpointError, match="no batch"):
        next(Feed(DataLoader(Empty())))

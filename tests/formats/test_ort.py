"""The flatbuffer format against files that real ORT releases wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.formats.ort import checkpoint as ort
from torch_ort_ckpt.formats.ort import extras

from ..truth import Truth, fixtures


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", fixtures("fbv"))
def test_every_fixture_equals_its_truth(name: str, mmap: bool) -> None:
    truth = Truth(name)
    state = toc.load(truth.checkpoint, mmap=mmap)
    truth.assert_equal(state)
    assert state.format_version == int(name[3])
    assert state.nominal == truth.json["is_nominal"]


@pytest.mark.parametrize("options", [{}, {"external_data": True}, {"version": 1}], ids=["inline", "external", "v1"])
@pytest.mark.parametrize("name", [name for name in fixtures("fbv") if "nominal" not in name])
def test_every_fixture_survives_a_round_trip(name: str, options: dict[str, object], tmp_path: Path) -> None:
    state = toc.load(Truth(name).checkpoint)
    toc.save(state, tmp_path / "checkpoint", **options)
    again = toc.load(tmp_path / "checkpoint")
    assert again == state
    Truth(name).assert_equal(again)


def adamw() -> toc.CheckpointState:
    return toc.load(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)


def test_v1_and_v2_of_one_state_differ_only_in_the_version(tmp_path: Path) -> None:
    toc.save(adamw(), tmp_path / "v1", version=1)
    toc.save(adamw(), tmp_path / "v2")
    one, two = (tmp_path / "v1").read_bytes(), (tmp_path / "v2").read_bytes()
    assert len(one) == len(two)
    assert sum(a != b for a, b in zip(one, two, strict=True)) == 1
    assert (toc.load(tmp_path / "v1").format_version, toc.load(tmp_path / "v2").format_version) == (1, 2)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (toc.CheckpointState(nominal=True), {"version": 1}, "version 1 has no nominal"),
        (toc.CheckpointState(), {"version": 1, "external_data": True}, "version 1 has no external data"),
        (toc.CheckpointState(), {"version": 3}, "no version 3"),
        (toc.CheckpointState(nominal=True), {"external_data": True}, "nominal"),
        (toc.CheckpointState({"c": torch.zeros(1, dtype=torch.complex64)}), {}, "no element type complex64"),
        (toc.CheckpointState({"m": torch.empty(2, device="meta")}), {}, "has no data"),
        (toc.CheckpointState({"w": torch.zeros(1)}, {"w": torch.zeros(1)}), {}, "both trainable and frozen"),
        (toc.CheckpointState(properties={"torch_ort_ckpt.x": 1}), {}, "reserved"),
        (toc.CheckpointState(properties={"n": 1 << 63}), {}, "beyond 64 bits"),
        (toc.CheckpointState(properties={"n": None}), {}, "must be int, float or str"),  # type: ignore[dict-item]
        (toc.CheckpointState({"\ud800": torch.zeros(1)}), {}, "not Unicode text"),
        (toc.CheckpointState(optimizer={"group0": toc.OptimizerGroup(step=1 << 70)}), {}, "step beyond 64 bits"),
        (toc.CheckpointState(), {"groups": "all"}, "groups='all'"),
    ],
)
def test_what_the_format_can_not_hold_is_refused(
    state: toc.CheckpointState, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "c").write_text("before")
    with pytest.raises(toc.CheckpointError, match=message):
        toc.save(state, tmp_path / "c", **options)
    assert (tmp_path / "c").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.posix  # on Windows files are read, not mapped
def test_tensor_data_is_aligned_and_aliased(tmp_path: Path) -> None:
    for options in ({}, {"external_data": True}):
        toc.save(adamw(), tmp_path / "c", **options)
        state = toc.load(tmp_path / "c")
        assert all(value.data_ptr() % 64 == 0 for _, value in state.tensors())
        spans = sorted((value.data_ptr(), value.data_ptr() + value.nbytes) for _, value in state.tensors())
        assert spans[-1][1] - spans[0][0] < 64 * len(spans) + sum(end - start for start, end in spans)  # one mapping, no copies


def test_an_inline_save_takes_the_old_sidecar_away(tmp_path: Path) -> None:
    toc.save(adamw(), tmp_path / "c", external_data=True)
    assert (tmp_path / "c.data").exists()
    toc.save(adamw(), tmp_path / "c")
    assert [place.name for place in tmp_path.iterdir()] == ["c"]
    (tmp_path / "c.data").write_text("somebody else's")  # not the data of this checkpoint: left alone
    toc.save(adamw(), tmp_path / "c")
    assert (tmp_path / "c.data").read_text() == "somebody else's"


def test_external_data_is_chosen_near_the_threshold_of_ort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(value.nbytes for _, value in adamw().tensors())
    monkeypatch.setattr(ort, "EXTERNAL_THRESHOLD", size)
    toc.save(adamw(), tmp_path / "c")
    assert not (tmp_path / "c.data").exists()
    monkeypatch.setattr(ort, "EXTERNAL_THRESHOLD", size - 1)
    toc.save(adamw(), tmp_path / "c")
    assert (tmp_path / "c.data").exists()
    assert toc.load(tmp_path / "c") == adamw()
    toc.save(adamw(), tmp_path / "v1", version=1)  # version 1 has none
    assert not (tmp_path / "v1.data").exists()


def test_without_optimizer(tmp_path: Path) -> None:
    toc.save(adamw(), tmp_path / "c", include_optimizer=False)
    state = toc.load(tmp_path / "c")
    assert not state.optimizer
    assert state.parameters.keys() == adamw().parameters.keys()


class TestLearningRate:
    def test_is_kept_exactly(self, tmp_path: Path) -> None:
        state = adamw()
        group = state.optimizer["group0"]
        group.lr, group.initial_lr = 0.1, 1 / 3
        group.hyperparameters = {"betas": [0.9, 0.999]}
        state.properties["loss"] = 0.1  # not a float32
        toc.save(state, tmp_path / "c")
        assert toc.load(tmp_path / "c") == state

    def test_is_dropped_once_training_went_on_elsewhere(self, tmp_path: Path) -> None:
        state = adamw()
        state.optimizer["group0"].lr = 0.1
        toc.save(state, tmp_path / "c")
        state = toc.load(tmp_path / "c")
        kept = extras.pack(state, tmp_path)
        state.trainable["fc1.bias"] = state.trainable["fc1.bias"] + 1  # what ORT does, carrying the properties along
        state.properties, state.optimizer["group0"].lr = kept, None
        assert extras.unpack(state, tmp_path).optimizer["group0"].lr is None


class TestAliases:
    def state(self) -> toc.CheckpointState:
        state = adamw()
        state.mixed_precision = {name: value.half() for name, value in state.trainable.items()}
        return state

    def test_are_written_on_request(self, tmp_path: Path) -> None:
        toc.save(self.state(), tmp_path / "c")
        assert not toc.load(tmp_path / "c").mixed_precision
        toc.save(self.state(), tmp_path / "c", include_mixed_precision=True)
        assert toc.load(tmp_path / "c") == self.state()

    def test_follow_their_masters_or_are_refused(self, tmp_path: Path) -> None:
        state = self.state()
        state.mixed_precision["fc1.bias"] = state.mixed_precision["fc1.bias"] + 1
        with pytest.raises(toc.CheckpointError, match="mixed_precision/fc1"):
            toc.save(state, tmp_path / "c", include_mixed_precision=True, strict=True)
        with pytest.warns(toc.CheckpointWarning, match=r"1 stale half-precision aliases.*fc1\.bias"):
            toc.save(state, tmp_path / "c", include_mixed_precision=True)
        assert toc.load(tmp_path / "c", strict=True) == self.state()

    def test_that_disagree_are_an_error_in_strict_mode(self, tmp_path: Path) -> None:
        state = self.state()
        state.mixed_precision["fc1.bias"] = (state.trainable["fc1.bias"] + 1).half()
        toc.formats.module("ort").write(state, tmp_path / "c")  # as ORT would write it, which does not check
        assert toc.load(tmp_path / "c").stale_aliases() == ["fc1.bias"]
        with pytest.raises(toc.CheckpointError, match="differ from their rounded masters"):
            toc.load(tmp_path / "c", strict=True)


class TestGroups:
    """ORT trains only from a complete `group0`; what we change to give it one is undone when we load the file."""

    def test_a_group_of_another_name(self, tmp_path: Path) -> None:
        state = adamw()
        state.optimizer["decay"] = state.optimizer.pop("group0")
        toc.save(state, tmp_path / "c")
        assert b"decay" in (tmp_path / "c").read_bytes()
        assert toc.load(tmp_path / "c") == state

    def test_moments_that_are_missing(self, tmp_path: Path) -> None:
        state = adamw()
        del state.optimizer["group0"].states["fc1.bias"]
        del state.optimizer["group0"].states["fc2.bias"]["momentum1"]
        state.optimizer["group0"].states["norm.gain"] = {}
        toc.save(state, tmp_path / "c")
        assert toc.load(tmp_path / "c") == state
        raw = ort.read(tmp_path / "c")
        assert raw == state

    def test_no_moments_at_all(self, tmp_path: Path) -> None:
        state = adamw()
        state.optimizer["group0"].states = {name: {} for name in state.trainable}
        toc.save(state, tmp_path / "c")
        assert toc.load(tmp_path / "c") == state


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="It has: external_data, groups, version"):
        toc.save(adamw(), tmp_path / "c", shards=3)
    with pytest.raises(toc.CheckpointError, match="unknown format 'xyz'"):
        toc.save(adamw(), tmp_path / "c", format="xyz")


def test_an_existing_file_is_kept_unless_overwriting(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("before")
    with pytest.raises(toc.CheckpointError, match="exists already"):
        toc.save(adamw(), tmp_path / "c", overwrite=False)
    assert (tmp_path / "c").read_text() == "before"


def test_links_and_modes_are_respected(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    toc.save(adamw(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert toc.load(tmp_path / "real") == adamw()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_views_and_foreign_layouts_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "t": base.permute(2, 0, 1),
        "e": torch.ones(1).expand(5),
        "s": base[:, 1],
        "c": torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last),
    }
    views["n"] = torch.zeros(2, dtype=torch.complex64).conj().imag  # carries the negative bit
    toc.save(toc.CheckpointState(dict(views)), tmp_path / "c")
    assert toc.load(tmp_path / "c") == toc.CheckpointState({name: value.clone() for name, value in views.items()})

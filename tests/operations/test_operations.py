"""`average`, `diff`, `convert`, `verify` and `summarize`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from tests.truth import Truth
from torch_ort_ckpt.operations.summarize import summarize


def adamw() -> toc.CheckpointState:
    return toc.load(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)


class TestAverage:
    def test_is_the_weighted_mean_in_double_precision(self, tmp_path: Path) -> None:
        generator = np.random.default_rng(0)
        weights = [3.0, 1.0, 7.5]
        sources = [generator.standard_normal((5, 4)).astype(np.float32) for _ in weights]
        for number, source in enumerate(sources):
            group = toc.OptimizerGroup(step=4, states={"w": {"momentum0": torch.from_numpy(source * 2)}})
            toc.save(toc.CheckpointState({"w": torch.from_numpy(source)}, optimizer={"group0": group}), tmp_path / str(number))
        result = toc.average([tmp_path / str(number) for number in range(3)], weights)
        expected = sum(w / sum(weights) * source.astype(np.float64) for w, source in zip(weights, sources, strict=True))
        assert np.array_equal(result.trainable["w"].numpy(), expected.astype(np.float32))
        moment = result.optimizer["group0"].states["w"]["momentum0"].numpy()
        assert np.allclose(moment, expected * 2, rtol=1e-7)
        assert result.step == 4

    def test_of_one_state_with_itself_is_the_state(self) -> None:
        state = adamw()
        assert toc.average([state, Truth("fbv2_ort1_19_2_adamw_full").checkpoint, state]) == state

    def test_large_tensors_are_averaged_in_pieces(self) -> None:
        ones, threes = torch.ones((1 << 22) + 7), torch.full(((1 << 22) + 7,), 3.0)
        result = toc.average([toc.CheckpointState({"w": ones}), toc.CheckpointState({"w": threes})])
        assert torch.equal(result.trainable["w"], torch.full_like(ones, 2.0))

    def test_integers_round_and_aliases_follow(self) -> None:
        def one(value: float, count: int) -> toc.CheckpointState:
            weight = torch.tensor([value])
            return toc.CheckpointState({"w": weight}, {"n": torch.tensor([count])}, mixed_precision={"w": weight.half()})

        result = toc.average([one(1.0, 3), one(2.0, 4), one(2.0, 4)])
        assert result.frozen["n"].tolist() == [4]
        assert result.mixed_precision["w"].tolist() == result.trainable["w"].half().tolist()

    def test_differing_steps_and_properties_are_named(self) -> None:
        a, b = adamw().clone(), adamw().clone()
        b.optimizer["group0"].step = 9
        b.properties["epoch"] = 4
        with pytest.warns(toc.CheckpointWarning) as caught:
            result = toc.average([a, b])
        assert result.step == 9
        assert "epoch" not in result.properties
        assert {"different steps" in str(w.message) or "epoch" in str(w.message) for w in caught} == {True}

    @pytest.mark.parametrize(
        ("others", "weights", "message"),
        [
            ([], None, "nothing to average"),
            ([toc.CheckpointState({"w": torch.zeros(2)})], [1, 2], "2 weights for 1"),
            ([toc.CheckpointState({"w": torch.zeros(2)})], [-1], "not negative"),
            ([toc.CheckpointState({"w": torch.zeros(2)})], [math.nan], "finite"),
            ([toc.CheckpointState({"w": torch.zeros(2)}), toc.CheckpointState({"v": torch.zeros(2)})], None, "trainable/v"),
            ([toc.CheckpointState({"w": torch.zeros(2)}), toc.CheckpointState({"w": torch.zeros(3)})], None, "trainable/w"),
            ([toc.CheckpointState({"w": torch.tensor(True)}), toc.CheckpointState({"w": torch.tensor(False)})], None, "can't be averaged"),
            ([toc.CheckpointState(nominal=True)], None, "nominal"),
        ],
    )
    def test_refuses_what_has_no_mean(self, others: list[toc.CheckpointState], weights: list[float] | None, message: str) -> None:
        with pytest.raises(toc.CheckpointError, match=message):
            toc.average(others, weights)


class TestDiff:
    def test_equal_states_are_equal(self) -> None:
        report = toc.diff(adamw(), Truth("fbv2_ort1_18_0_adamw_full").checkpoint)
        assert report.equal
        assert report.compared > 30

    @pytest.mark.parametrize("other", [1.0, 2.0])
    def test_a_report_has_no_truth_value(self, other: float) -> None:
        report = toc.diff(toc.CheckpointState({"w": torch.tensor(1.0)}), toc.CheckpointState({"w": torch.tensor(other)}))
        assert isinstance(report, toc.DiffReport)
        assert report.equal is (other == 1.0)
        with pytest.raises(TypeError, match=r"use \.equal"):
            bool(report)

    def test_says_what_and_by_how_much(self) -> None:
        a, b = adamw(), adamw().clone()
        b.trainable["fc1.bias"][3] += 0.5
        del b.frozen["frozen.u8"]
        b.properties["epoch"] = 4
        b.optimizer["group0"].step = 6
        found = {item.name: item for item in toc.diff(a, b)}
        assert found.keys() == {"trainable/fc1.bias", "frozen/frozen.u8", "properties/epoch", "optimizer/group0.step"}
        assert found["trainable/fc1.bias"].changed == 1
        assert found["trainable/fc1.bias"].max_abs == pytest.approx(0.5)
        assert found["properties/epoch"].what == "3 / 4"
        assert "fc1.bias: 1 of 16 elements" in str(toc.diff(a, b))

    def test_a_notebook_shows_a_table(self) -> None:
        a = toc.CheckpointState({"<w>": torch.tensor([1.0, 100.0])}, properties={"epoch": 1})
        b = toc.CheckpointState({"<w>": torch.tensor([1.0, 101.0])})
        table = ElementTree.fromstring(toc.diff(a, b)._repr_html_())
        assert table.findtext("caption") == "3 compared, 2 differ"
        assert [[cell.text or "" for cell in row] for row in table.iter("tr")] == [
            ["name", "what", "elements", "max |a-b|", "relative"],
            ["trainable/<w>", "values", "1 of 2", "1", "0.0099"],
            ["properties/epoch", "only in a", "", "", ""],
        ]
        assert ElementTree.fromstring(toc.diff(a, a)._repr_html_()).find("thead") is None

    def test_tolerance(self) -> None:
        a = toc.CheckpointState({"w": torch.tensor([1.0, 100.0])})
        b = toc.CheckpointState({"w": torch.tensor([1.0, 101.0])})
        assert not toc.diff(a, b).equal
        assert toc.diff(a, b, atol=1.0).equal
        assert toc.diff(a, b, rtol=0.01).equal
        assert not toc.diff(a, b, rtol=0.001).equal
        with pytest.raises(toc.CheckpointError, match="atol"):
            toc.diff(a, b, atol=-1)

    @pytest.mark.parametrize(("x", "y"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, -0.0)])
    def test_special_values_differ(self, x: float, y: float) -> None:
        report = toc.diff(toc.CheckpointState({"w": torch.tensor([x])}), toc.CheckpointState({"w": torch.tensor([y])}))
        assert [item.changed for item in report] == [1]

    @pytest.mark.parametrize(
        "other", [torch.zeros(2, dtype=torch.float64), torch.zeros(3), np.array(["x", "y"], dtype=object), torch.empty(2, device="meta")]
    )
    def test_other_kinds_differ(self, other: object) -> None:
        report = toc.diff(toc.CheckpointState({"w": torch.zeros(2)}), toc.CheckpointState({"w": other}))
        assert [item.name for item in report] == ["trainable/w"]


def test_only_a_state_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match=r"expected a CheckpointState, not dict.*from_torch"):
        toc.save({}, tmp_path / "x")  # type: ignore[arg-type]


class TestConvert:
    def test_round_the_houses(self, tmp_path: Path) -> None:
        source = Truth("fbv1_ort1_16_3_adamw_full").checkpoint
        toc.convert(source, tmp_path / "a.safetensors")
        toc.convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
        toc.convert(tmp_path / "b.pt", tmp_path / "c", version=1)
        assert toc.load(tmp_path / "c") == toc.load(source)
        assert toc.load(tmp_path / "c").format_version == 1

    def test_formats_can_be_given(self, tmp_path: Path) -> None:
        toc.save(adamw(), tmp_path / "source")
        toc.convert(tmp_path / "source", tmp_path / "copy.bin", from_format="ort", to_format="safetensors")
        assert toc.detect(tmp_path / "copy.bin") == "safetensors"
        with pytest.raises(toc.CheckpointError):
            toc.convert(tmp_path / "source", tmp_path / "other.bin", from_format="safetensors", to_format="ort")

    def test_the_old_word_for_the_format_still_works(self, tmp_path: Path) -> None:
        toc.save(adamw(), tmp_path / "source")
        with pytest.warns(DeprecationWarning, match=r"convert\(to=\) is now convert\(to_format=\)") as caught:
            toc.convert(tmp_path / "source", tmp_path / "copy.bin", to="safetensors")
        assert caught[0].filename == __file__
        assert toc.detect(tmp_path / "copy.bin") == "safetensors"
        with pytest.warns(DeprecationWarning, match="to_format"), pytest.raises(toc.CheckpointError, match="both given"):
            toc.convert(tmp_path / "source", tmp_path / "other", to="safetensors", to_format="ort")

    def test_names_and_transposes_apply_to_moments_too(self, tmp_path: Path) -> None:
        (tmp_path / "map.json").write_text('{"fc1.weight": {"name": "linear.weight", "transpose": true}}')
        source = Truth("fbv2_ort1_19_2_adamw_full").checkpoint
        toc.convert(source, tmp_path / "a.safetensors", names=tmp_path / "map.json")
        state = toc.load(tmp_path / "a.safetensors")
        assert torch.equal(state.trainable["linear.weight"], adamw().trainable["fc1.weight"].T)
        assert state.optimizer["group0"].states["linear.weight"]["momentum1"].shape == (12, 16)

    def test_dtype_and_parts(self, tmp_path: Path) -> None:
        source = Truth("fbv2_ort1_19_2_adamw_full").checkpoint
        toc.convert(source, tmp_path / "a.safetensors", dtype=torch.bfloat16, include_optimizer=False)
        state = toc.load(tmp_path / "a.safetensors")
        assert state.trainable["fc1.weight"].dtype == torch.bfloat16
        assert state.frozen["frozen.i64"].dtype == torch.int64
        assert not state.optimizer

    @pytest.mark.parametrize("form", ["safetensors", "ort"])
    @pytest.mark.parametrize("position", ["middle", "end"])
    def test_bytes_that_change_on_their_way_are_noticed(self, tmp_path: Path, form: str, position: str) -> None:
        state = toc.CheckpointState(trainable={"w": torch.arange(700_000, dtype=torch.float32), "v": torch.ones(3)})
        toc.save(state, tmp_path / "source")
        destination = tmp_path / f"copy.{form}"
        changed = []

        def flip(_: int) -> None:
            """Damages the last byte written so far, or one half a piece before."""
            (temporary,) = tmp_path.glob(".copy*.tmp")
            if not changed and temporary.stat().st_size > 2_000_000:
                with open(temporary, "r+b") as file:
                    file.seek(-1 if position == "end" else -500_000, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
                changed.append(byte)

        with pytest.raises(toc.CheckpointError, match="not what was written"):
            toc.convert(tmp_path / "source", destination, to_format=form, progress=flip)
        assert changed
        toc.convert(tmp_path / "source", destination, to_format=form, overwrite=True)
        assert toc.load(destination, format=form) == state

    def test_needs_permission_to_overwrite(self, tmp_path: Path) -> None:
        source = Truth("fbv2_ort1_19_2_sgd_full").checkpoint
        toc.convert(source, tmp_path / "a.pt")
        with pytest.raises(toc.CheckpointError, match="exists already"):
            toc.convert(source, tmp_path / "a.pt")
        toc.convert(source, tmp_path / "a.pt", overwrite=True)

    def test_refuses_what_it_can_not_tell(self, tmp_path: Path) -> None:
        source = Truth("fbv2_ort1_19_2_sgd_full").checkpoint
        with pytest.raises(toc.CheckpointError, match="can't tell a format"):
            toc.convert(source, tmp_path / "a.xyz")
        with pytest.raises(toc.CheckpointError, match="has no option shards"):
            toc.convert(source, tmp_path / "a.pt", shards=3)
        with pytest.raises(toc.CheckpointError, match="no such file"):
            toc.convert(tmp_path / "nothing", tmp_path / "a.pt")


class TestVerify:
    def test_sound_checkpoints_pass(self) -> None:
        result = toc.verify(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)
        assert result
        assert (result.format, result.tensors) == ("ort", 22)

    def test_finds_what_is_wrong(self, tmp_path: Path) -> None:
        state = adamw().clone()
        state.trainable["fc1.bias"][:2] = math.nan
        state.trainable["fc2.bias"][0] = -math.inf
        state.optimizer["group0"].states["norm.gain"]["momentum0"] = torch.zeros(3)
        state.optimizer["group0"].states["ghost"] = {"momentum0": torch.zeros(1), "momentum1": torch.zeros(1)}
        state.optimizer["group0"].step = -1
        toc.save(state, tmp_path / "bad")
        text = "\n".join(toc.verify(tmp_path / "bad").problems)
        for part in (
            "fc1.bias: 2 of 16 elements are NaN",
            "fc2.bias: 1 of 5 elements are infinite",
            "norm.gain/momentum0: shape (3,)",
            "ghost",
            "negative step",
        ):
            assert part in text

    def test_a_damaged_file_is_a_problem_not_an_exception(self, tmp_path: Path) -> None:
        data = bytearray(Truth("fbv2_ort1_19_2_adamw_full").checkpoint.read_bytes())
        (tmp_path / "cut").write_bytes(data[:3000])
        assert "cut" in toc.verify(tmp_path / "cut").problems[0]
        assert "no such file" in toc.verify(tmp_path / "nothing").problems[0]

    def test_odd_booleans(self, tmp_path: Path) -> None:
        odd = torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool)
        toc.save(toc.CheckpointState({}, {"flag": odd}), tmp_path / "c")
        assert "neither 0 nor 1" in toc.verify(tmp_path / "c").problems[0]


def test_summarize_measures_in_double_precision() -> None:
    found = summarize(Truth("fbv2_ort1_19_2_adamw_full").checkpoint)
    state = adamw()
    item = next(item for item in found.tensors if item.name == "fc1.weight")
    assert item.statistics is not None
    expected = state.trainable["fc1.weight"].double()
    assert item.statistics.mean == pytest.approx(float(expected.mean()), rel=1e-12)
    assert item.statistics.std == pytest.approx(float(expected.std(correction=0)), rel=1e-9)
    assert item.moments == ("momentum0", "momentum1")
    assert found.total_bytes == sum(value.nbytes for _, value in state.tensors())
    assert all(item.statistics is None for item in summarize(Truth("fbv2_ort1_19_2_nominal").checkpoint).tensors)

"""A nominal checkpoint has names and no values: whatever needs values raises an error, as in ORT, instead of using zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.official import Official, assert_same, batches
from tests.truth import DATA

pytestmark = pytest.mark.ort_any

NOMINAL = DATA / "fbv2_ort1_19_2_nominal"
ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


@pytest.fixture
def model() -> toc.OrtModule:
    return toc.OrtModule(NOMINAL, threads=1)


@pytest.fixture
def session() -> toc.TrainingSession:
    return toc.TrainingSession(NOMINAL, threads=1)


def complete() -> toc.CheckpointState:
    return toc.load(NOMINAL / "complete_checkpoint")


@pytest.mark.ort
def test_ort_refuses(tmp_path: Path) -> None:
    """What the tests below compare with."""
    from onnxruntime.training import api

    state = api.CheckpointState.load_checkpoint(str(NOMINAL / "checkpoint"))
    module = api.Module(str(NOMINAL / "training_model.onnx"), state, str(NOMINAL / "eval_model.onnx"))
    for call in (
        lambda: module.get_contiguous_parameters(True),
        lambda: module.export_model_for_inferencing(str(tmp_path / "model.onnx"), ["loss"]),
        lambda: state.parameters["fc1.weight"].data,
    ):
        with pytest.raises(RuntimeError, match="nominal"):
            call()


USES: dict[str, Callable[[toc.OrtModule, Path], Any]] = {
    "export_inference": lambda model, path: model.export_inference(path),
    "state_dict": lambda model, path: model.state_dict(),
    "state_dict of a module around it": lambda model, path: nn.Sequential(model).state_dict(),
    "from_torch": lambda model, path: toc.from_torch(model),
    "CheckpointManager.save": lambda model, path: toc.CheckpointManager(path.parent / "entries").save(1, model),
    "train_step": lambda model, path: model.train_step(*batches(model.artifacts, 1)[0]),
}


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "partly filled"])
@pytest.mark.parametrize("use", USES)
def test_a_module_without_values_refuses(model: toc.OrtModule, use: str, filled: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    if filled:
        model.load_state_dict({"fc1.weight": torch.ones(16, 12)}, strict=False)
    with pytest.raises(toc.CheckpointError, match=r"nominal.*(fc1\.bias|no values)"):
        USES[use](model, path)
    assert not path.exists()
    model.load_checkpoint(complete())
    USES[use](model, path)


@pytest.mark.parametrize(
    "get",
    [
        lambda session: session.get_contiguous_parameters(trainable_only=True),
        lambda session: session.get_contiguous_parameters(),
        lambda session: session.get_state_tensors(),
        lambda session: session.get_model_state(),
        lambda session: session.optimizer_step(),
    ],
    ids=["contiguous trainable", "contiguous all", "state tensors", "model state", "optimizer step"],
)
def test_a_session_without_values_refuses(session: toc.TrainingSession, get: Callable[[toc.TrainingSession], Any]) -> None:
    with pytest.raises(toc.CheckpointError, match="nominal"):
        get(session)


def test_a_session_is_completed_by_its_state_tensors(session: toc.TrainingSession) -> None:
    assert session.get_parameters_size(trainable_only=True) == 294
    values = {name: value for name, value in complete().parameters.items() if isinstance(value, torch.Tensor)}
    session.set_state_tensors(values)
    assert torch.equal(session.get_state_tensors()["fc1.weight"], values["fc1.weight"])
    (inputs,) = batches(session.artifacts, 1)
    assert torch.isfinite(session.train_step(*inputs))


def test_its_checkpoint_is_the_nominal_one_and_half_of_it_is_refused(model: toc.OrtModule, tmp_path: Path) -> None:
    assert model.checkpoint() == toc.load(NOMINAL / "checkpoint")
    toc.save(model.checkpoint(), tmp_path / "again")
    assert toc.load(tmp_path / "again") == toc.load(NOMINAL / "checkpoint")
    assert copy.deepcopy(model).checkpoint().nominal
    model.load_state_dict({"fc1.weight": torch.ones(16, 12)}, strict=False)
    with pytest.raises(toc.CheckpointError, match=r"fc1\.bias"):
        model.checkpoint()


def test_counters_that_no_graph_reads_do_not_keep_a_model_from_running(tmp_path: Path) -> None:
    artifacts = exported("cnn", nominal=True)
    place = tmp_path / "cnn"
    place.mkdir()
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        (place / name).write_bytes((artifacts.folder / name).read_bytes())
    (place / "checkpoint").write_bytes((artifacts.folder / "nominal_checkpoint").read_bytes())
    session, whole = toc.TrainingSession(place, threads=1), toc.TrainingSession(artifacts, threads=1)
    session.copy_buffer_to_parameters(whole.get_contiguous_parameters(), trainable_only=False)
    assert not session.model.nominal
    assert_same(session.train_step(*batch("cnn")), whole.train_step(*batch("cnn")))
    assert session.checkpoint().nominal is False


class TestStates:
    def test_a_state_dict_is_refused(self) -> None:
        with pytest.raises(toc.CheckpointError, match="nominal"):
            toc.to_state_dict(toc.load(NOMINAL / "checkpoint"))

    def test_modules_made_from_artifacts_are_refused(self) -> None:
        with pytest.raises(toc.CheckpointError, match="nominal"):
            toc.to_torch_module(NOMINAL)
        with pytest.raises(toc.CheckpointError, match="nominal"):
            toc.pipeline_stages(NOMINAL, 2)

    def test_a_difference_is_that_one_has_no_data(self) -> None:
        report = str(toc.diff(NOMINAL / "checkpoint", NOMINAL / "complete_checkpoint"))
        assert "trainable/fc1.weight: one has no data" in report
        assert "shape ()" not in report

    def test_inspect_does_not_claim_shapes(self, capsys: pytest.CaptureFixture[str]) -> None:
        from torch_ort_ckpt.cli import main

        assert main(["inspect", str(NOMINAL / "checkpoint")]) == 0
        page = capsys.readouterr().out
        assert "unknown" in page
        assert "scalar" not in page


class TestAStepBeforeAnyTraining:
    @pytest.mark.parametrize("folder", [ADAMW, DATA / "fbv2_ort1_19_2_sgd_full"], ids=["adamw", "sgd"])
    @pytest.mark.ort
    def test_takes_zero_gradients_as_ort_does(self, folder: Path, tmp_path: Path) -> None:
        artifacts = toc.Artifacts.load(folder)
        session, official = toc.TrainingSession(artifacts, threads=1), Official(artifacts, tmp_path)
        before = session.step
        session.set_learning_rate(0.01)
        official.optimizer.set_learning_rate(0.01)
        for _ in range(2):
            assert session.optimizer_step() is True
            official.optimizer.step()
        for inputs in batches(artifacts, 2):
            assert_same(session.train_step(*inputs), official.loss(*inputs))
            session.optimizer_step()
            official.optimizer.step()
            session.lazy_reset_grad()
            official.module.lazy_reset_grad()
        for name, value in official.parameters():
            assert_same(session.get_state_tensors()[name], value)
        official.save(tmp_path / "after")
        assert session.step == before + 4 == toc.load(tmp_path / "after").step

    def test_an_optimizer_of_pytorch_s_kind_does_nothing_and_says_so(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        optimizer = toc.OrtOptimizer(model)
        optimizer.step()
        assert optimizer.updated is False
        assert optimizer.checkpoint_step == 5
        model(*batches(model.artifacts, 1)[0]).backward()
        optimizer.step()
        assert optimizer.updated is True
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.updated is False

    def test_one_group_with_gradients_is_an_update(self) -> None:
        model = toc.OrtModule(ADAMW, threads=1)
        parameters = list(model.named_trainable().values())
        optimizer = toc.OrtOptimizer(model, params=[{"params": parameters[:1]}, {"params": parameters[1:]}])
        model(*batches(model.artifacts, 1)[0]).backward()
        for parameter in parameters[1:]:
            parameter.grad = None
        optimizer.step()
        assert optimizer.updated is True

"""`TrainingSession`: ORT's vocabulary, against ORT's own objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported
from tests.official import Official, assert_same, batches
from tests.truth import DATA

pytestmark = pytest.mark.ort_any

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"


@pytest.fixture
def session() -> toc.TrainingSession:
    return toc.TrainingSession(exported("mlp"), threads=1)


@pytest.mark.ort
def test_the_verbs_of_a_training_loop_equal_the_official_api(tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    session, official = toc.TrainingSession(artifacts, threads=1), Official(artifacts, tmp_path)
    session.set_learning_rate(0.01)
    official.optimizer.set_learning_rate(0.01)
    assert session.get_learning_rate() == 0.01
    data = batches(artifacts, 9)
    for index, inputs in enumerate(data):
        assert_same(session.train_step(*inputs), official.loss(*inputs))
        if index % 3 == 2:  # gradients accumulate over three batches
            assert session.optimizer_step() is True
            official.optimizer.step()
            session.lazy_reset_grad()
            official.module.lazy_reset_grad()
    assert_same(session.eval_step(*data[0]), official.evaluate(*data[0]))
    for name, value in official.parameters():
        assert_same(session.get_state_tensors()[name], value)
    assert session.step == artifacts.state.optimizer["group0"].step + 3


@pytest.mark.ort
def test_contiguous_parameters_are_laid_out_as_ort_does(tmp_path: Path) -> None:
    import onnxruntime

    artifacts = exported("cnn")
    session, official = toc.TrainingSession(artifacts, threads=1), Official(artifacts, tmp_path)
    assert session.get_parameters_size(trainable_only=True) == official.module.get_parameters_size(True)
    theirs = official.module.get_contiguous_parameters(trainable_only=True).numpy()
    assert_same(session.get_contiguous_parameters(trainable_only=True), theirs)
    buffer = torch.arange(len(theirs), dtype=torch.float32)
    session.copy_buffer_to_parameters(buffer)
    official.module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(buffer.numpy())._ortvalue, True)
    for name, value in official.parameters():
        if name in artifacts.trainable:
            assert_same(session.get_state_tensors()[name], value)
    assert_same(session.get_contiguous_parameters(trainable_only=True), buffer)
    with pytest.raises(toc.CheckpointError, match="elements"):
        session.copy_buffer_to_parameters(buffer[:-1])


def test_set_state_tensors_checks_everything_first(session: toc.TrainingSession) -> None:
    before = {name: value.clone() for name, value in session.get_state_tensors().items()}
    good = torch.ones(16)
    bad: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"fc1.bias": good, "fc9.bias": good}, "unknown state tensors: fc9.bias"),
        ({"fc1.bias": good, "fc2.bias": torch.ones(6)}, r"fc2\.bias: is torch\.float32 \[6\]"),
        ({"fc1.bias": good, "fc2.bias": torch.ones(5, dtype=torch.float64)}, r"fc2\.bias: is torch\.float64"),
        ({"fc1.bias": good, "Moment_1_fc2.bias": torch.ones(6)}, r"Moment_1_fc2\.bias: is"),
    ]
    for tensors, message in bad:
        with pytest.raises(toc.CheckpointError, match=message):
            session.set_state_tensors(tensors)
        assert all(torch.equal(value, before[name]) for name, value in session.get_state_tensors().items())
    with pytest.raises(toc.CheckpointError, match=r"fc2\.bias"):
        session.set_state_tensors({"fc2.bias": torch.ones(6)}, strict=False)
    session.set_state_tensors({"fc1.bias": good, "fc9.bias": good}, strict=False)
    assert torch.equal(session.model.fc1.bias, good)
    session.set_state_tensors({"fc1.bias": np.zeros(16, np.float32)})
    assert not session.model.fc1.bias.any()


def test_state_tensors_carry_a_run_to_another_session(session: toc.TrainingSession) -> None:
    for seed in range(4):
        session.train_step(*batch("mlp", seed=seed))
        session.optimizer_step()
        session.lazy_reset_grad()
    tensors = {name: value.clone() for name, value in session.get_state_tensors().items()}
    assert {"fc1.weight", "Moment_1_fc1.weight", "Moment_2_fc1.weight", "Update_Count_fc1.weight"} <= tensors.keys()
    assert tensors["Update_Count_fc1.weight"].tolist() == [5]
    other = toc.TrainingSession(exported("mlp"), threads=1)
    other.set_state_tensors(tensors)
    for each in (session, other):
        each.train_step(*batch("mlp", seed=9))
        each.optimizer_step()
    for name, value in session.get_state_tensors().items():
        assert_same(other.get_state_tensors()[name], value)


def test_model_and_optimizer_state(session: toc.TrainingSession) -> None:
    assert session.get_model_state().keys() == {"full_precision"}
    state = session.get_model_state(include_mixed_precision=True)
    assert state.keys() == {"full_precision", "mixed_precision"}
    assert state["full_precision"]["fc1.weight"].data_ptr() == session.model.fc1.weight.data_ptr()
    optimizer = session.get_optimizer_state()
    assert optimizer.keys() == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert optimizer["fc1.weight"].keys() == {"Moment_1", "Moment_2", "Update_Count"}


def test_half_precision_aliases_follow_their_masters(session: toc.TrainingSession) -> None:
    artifacts = exported("mlp")
    state = toc.load(artifacts.checkpoint_path)
    state.mixed_precision["fc1.weight"] = state.trainable["fc1.weight"].half()
    mixed = toc.TrainingSession(toc.Artifacts.load(artifacts.folder, checkpoint=state), threads=1)
    weight = torch.full((16, 12), 1 / 3)
    mixed.set_state_tensors({"fc1.weight": weight})
    assert torch.equal(mixed.get_state_tensors()["fc1.weight_fp16"], weight.half())
    mixed.set_state_tensors({"fc1.weight_fp16": (weight * 2).half()})
    assert torch.equal(mixed.model.fc1.weight, (weight * 2).half().float())
    with pytest.raises(toc.CheckpointError, match="rounded to"):
        mixed.set_state_tensors({"fc1.weight": weight, "fc1.weight_fp16": weight.half() + 1})
    assert torch.equal(mixed.model.fc1.weight, (weight * 2).half().float())
    assert torch.equal(mixed.get_model_state(include_mixed_precision=True)["mixed_precision"]["fc1.weight"], (weight * 2).half())
    assert mixed.checkpoint().stale_aliases() == []


def test_partition_names_are_rewritten_to_the_original() -> None:
    artifacts = exported("mlp")
    state = toc.load(artifacts.checkpoint_path)
    state.partitions["fc1.weight"] = toc.PartitionInfo((32, 12), megatron_row_partition=0)
    session = toc.TrainingSession(toc.Artifacts.load(artifacts.folder, checkpoint=state), threads=1)
    assert session.get_partition_info_map() == {"fc1.weight": {"original_dim": [32, 12], "megatron_row_partition": 0}}
    assert session.checkpoint().partitions == state.partitions
    assert session._original("fc7.weight_view_0") == "fc7.weight"
    assert session._original("fc1.weight") == "fc1.weight"


def test_schedulers(session: toc.TrainingSession) -> None:
    with pytest.raises(toc.CheckpointError, match="register_scheduler"):
        session.scheduler_step()
    session.set_learning_rate(1.0)
    session.register_scheduler(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    session.train_step(*batch("mlp"))
    session.optimizer_step()
    session.scheduler_step()
    assert session.get_learning_rate() == 0.5
    other = toc.TrainingSession(exported("mlp"), threads=1)
    other.register_scheduler(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    other.load_checkpoint(session.checkpoint().clone())
    assert other.get_learning_rate() == 0.5
    assert other.scheduler.last_epoch == 1


def test_artifacts_without_an_optimizer(tmp_path: Path) -> None:
    for name in ("training_model.onnx", "eval_model.onnx", "checkpoint"):
        (tmp_path / name).write_bytes((exported("mlp").folder / name).read_bytes())
    session = toc.TrainingSession(tmp_path, threads=1)
    session.train_step(*batch("mlp"))
    assert session.step == 0
    with pytest.raises(toc.CheckpointError, match="no optimizer_model"):
        session.optimizer_step()

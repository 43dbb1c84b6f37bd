"""A checkpoint continues the same training, here and in ORT's own API, with the numbers of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from tests.official import Official, assert_same, batches
from tests.truth import DATA

pytestmark = pytest.mark.ort_any

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"
NOMINAL = DATA / "fbv2_ort1_19_2_nominal"


def train(model: toc.OrtModule, optimizer: torch.optim.Optimizer, name: str, seeds: range, scheduler: object = None) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(*batch(name, seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]
        losses.append(loss.item())
    return losses


def test_a_checkpoint_is_the_live_memory_with_ort_s_names(tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.02)
    state = model.checkpoint(optimizer, properties={"epoch": 3})
    assert state.trainable.keys() == artifacts.state.trainable.keys()
    assert state.frozen.keys() == artifacts.state.frozen.keys()
    assert state.trainable["fc1.weight"].data_ptr() == model.fc1.weight.data_ptr()
    group = state.optimizer["group0"]
    assert (group.step, group.lr) == (artifacts.state.optimizer["group0"].step, 0.02)
    assert group.states["fc1.weight"].keys() == {"momentum0", "momentum1"}
    assert group.states["fc1.weight"]["momentum0"].data_ptr() == optimizer.state[model.fc1.weight]["exp_avg"].data_ptr()
    assert state.properties == {**artifacts.state.properties, "epoch": 3}
    toc.save(state, tmp_path / "checkpoint")
    assert toc.load(tmp_path / "checkpoint") == state


@pytest.mark.ort
def test_ort_continues_what_started_here_and_the_other_way_round(tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(ADAMW)
    data = batches(artifacts, 15)
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=1e-3)  # ORT's default
    for x, y in data[:5]:
        model.train_step(x, y)
        optimizer.step()
        model.lazy_reset_grad()
    official = Official(artifacts, tmp_path, state=model.checkpoint(optimizer))
    ours, theirs = [], []
    for x, y in data[5:10]:
        theirs.append(float(official.step(x, y)))
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.append(loss.item())
    assert ours == theirs
    official.save(tmp_path / "from_ort")
    resumed = toc.OrtModule(toc.Artifacts.load(ADAMW, checkpoint=tmp_path / "from_ort"), threads=1)
    resumed_optimizer = toc.OrtOptimizer(resumed, lr=1e-3)
    fresh = toc.OrtModule(ADAMW, threads=1)
    fresh_optimizer = toc.OrtOptimizer(fresh, lr=1e-3)
    fresh.load_checkpoint(tmp_path / "from_ort", fresh_optimizer)
    for x, y in data[10:]:
        expected = float(official.step(x, y))
        for each, update in ((resumed, resumed_optimizer), (fresh, fresh_optimizer)):
            loss = each(x, y)
            loss.backward()
            update.step()
            update.zero_grad()
            assert loss.item() == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mlp", "dropout", "cnn"])
def test_everything_survives_a_resume(name: str, fused: bool, tmp_path: Path) -> None:
    def start() -> tuple[toc.OrtModule, toc.OrtOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = toc.OrtModule(exported(name), threads=1, seed=11)
        optimizer = toc.OrtOptimizer(model, lr=0.05, fused=fused)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)

    model, optimizer, scheduler = start()
    train(model, optimizer, name, range(6), scheduler)
    toc.save(model.checkpoint(optimizer, scheduler=scheduler), tmp_path / "checkpoint")
    expected = train(model, optimizer, name, range(6, 12), scheduler)
    resumed, resumed_optimizer, resumed_scheduler = start()
    resumed.load_checkpoint(tmp_path / "checkpoint", resumed_optimizer, scheduler=resumed_scheduler)
    assert resumed_optimizer.checkpoint_step == 6
    assert train(resumed, resumed_optimizer, name, range(6, 12), resumed_scheduler) == expected
    assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for key, value in model.state_dict().items():
        assert_same(resumed.state_dict()[key], value)


def test_dropout_is_seeded(tmp_path: Path) -> None:
    x, y = batch("dropout")

    def losses(model: toc.OrtModule) -> list[float]:
        return [model(x, y).item() for _ in range(4)]

    torch.manual_seed(5)
    first = losses(toc.OrtModule(exported("dropout"), threads=1))
    assert len(set(first)) == 4
    torch.manual_seed(5)
    again = toc.OrtModule(exported("dropout"), threads=1)
    assert losses(again) == first
    torch.manual_seed(6)  # after construction, too
    other = losses(again)
    assert other != first
    assert losses(toc.OrtModule(exported("dropout"), threads=1, seed=5)) == first
    torch.rand(3)
    assert losses(toc.OrtModule(exported("dropout"), threads=1, seed=5)) == first  # not disturbed by other draws


def test_batch_norm_statistics_equal_pytorch_s() -> None:
    from torch.nn import functional as F

    model, native = toc.OrtModule(exported("cnn"), threads=1), module("cnn")
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.05), torch.optim.SGD(native.parameters(), lr=0.05)
    for seed in range(10):
        x, y = batch("cnn", size=3 + seed % 3, seed=seed)
        for loss, update in ((model(x, y), optimizer), (F.cross_entropy(native(x), y), plain)):
            loss.backward()
            update.step()
            update.zero_grad()
    for name, value in native.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], value, rtol=1e-5, atol=1e-6)
    x, y = batch("cnn", seed=99)
    assert model.eval()(x, y).item() == pytest.approx(F.cross_entropy(native.eval()(x), y).item(), rel=1e-4)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle, self.last = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.middle(self.norm(x)))))


def test_batch_norm_used_twice_keeps_pytorch_s_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native = Twice()
    model = toc.OrtModule(toc.export_artifacts(native, (torch.randn(8, 6),), tmp_path, dynamic_shapes={"x": {0: "batch"}}), threads=1)
    for size in (8, 5, 2):
        x, y = torch.randn(size, 6), torch.randint(0, 3, (size,))
        model(x, y)
        native(x)
    for name, value in native.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], value, rtol=1e-6, atol=1e-6)
    assert model.norm.num_batches_tracked == 6


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = model.checkpoint().clone()
    state.trainable["fc1.weight"] = torch.zeros(3)
    state.trainable["fc1.bias"].zero_()
    with pytest.raises(toc.CheckpointError, match=r"fc1\.weight: is torch\.float32 \[3\]"):
        model.load_checkpoint(state)
    del state.trainable["fc1.weight"]
    with pytest.raises(toc.CheckpointError, match=r"missing \['fc1\.weight'\]"):
        model.load_checkpoint(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_checkpoint(state, strict=False)
    assert not model.fc1.bias.any()
    assert torch.equal(model.fc1.weight, before["fc1.weight"])


def test_a_nominal_checkpoint_is_completed_from_a_state_dict_a_checkpoint_or_a_buffer() -> None:
    nominal = toc.Artifacts.load(NOMINAL)
    complete = toc.Artifacts.load(NOMINAL, checkpoint=NOMINAL / "complete_checkpoint")
    (data,) = batches(complete, 1)
    source = toc.OrtModule(complete, threads=1)
    expected = source(*data).item()
    assert "nominal" in " ".join(nominal.missing())
    model = toc.OrtModule(nominal, threads=1)
    with pytest.raises(toc.CheckpointError, match="nominal"):
        model(*data)
    model.load_state_dict(source.state_dict())
    assert model(*data).item() == expected
    model = toc.OrtModule(nominal, threads=1)
    model.load_checkpoint(NOMINAL / "complete_checkpoint")
    assert model(*data).item() == expected
    assert not model.checkpoint().nominal
    session = toc.TrainingSession(nominal, threads=1)
    session.set_state_tensors({name: value for name, value in source.state_dict().items() if name not in complete.trainable})
    session.copy_buffer_to_parameters(toc.TrainingSession(complete).get_contiguous_parameters(trainable_only=True))
    assert session.train_step(*data).item() == expected


def test_a_scheduler_without_plain_state_is_refused() -> None:
    model = toc.OrtModule(exported("mlp"))
    optimizer = toc.OrtOptimizer(model)

    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self) -> dict[str, object]:
            return {"self": self}

    with pytest.raises(toc.CheckpointError, match="not plain data"):
        model.checkpoint(optimizer, scheduler=Odd(optimizer))

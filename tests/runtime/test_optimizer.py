"""`OrtOptimizer` against ORT's own optimizer (bit for bit) and against `torch.optim` (to rounding)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torch_ort_ckpt as toc
from tests.official import Official, artifact_folders, assert_same, batches, loads_officially
from tests.truth import DATA

pytestmark = pytest.mark.ort

ADAMW = DATA / "fbv2_ort1_19_2_adamw_full"
SGD = DATA / "fbv2_ort1_19_2_sgd_full"
TRAINED = [name for name in artifact_folders() if "noopt" not in name and loads_officially(toc.Artifacts.load(DATA / name))]


def train(model: toc.OrtModule, optimizer: torch.optim.Optimizer, data: list[list[torch.Tensor]]) -> list[float]:
    losses = []
    for batch in data:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_optimizer(folder: Path, source: Path = ADAMW, *, clip: float | None = None, **attributes: Any) -> toc.Artifacts:
    """The artifacts of `source` with other hyper-parameters in the optimizer graph."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "initial_checkpoint"):
        (folder / name.removeprefix("initial_")).write_bytes((source / name).read_bytes())
    model = onnx.load(folder / "optimizer_model.onnx")
    (node,) = model.graph.node
    for attribute in node.attribute:
        if attribute.name in attributes:
            value = attributes[attribute.name]
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))
    if clip is not None:
        position = list(node.input).index("gradients")
        node.input[position] = "clipped"
        model.graph.node.insert(
            0, onnx.helper.make_node("InplaceClipGradNorm", ["gradients"], ["clipped"], domain="com.microsoft", max_norm=clip)
        )
    onnx.save(model, folder / "optimizer_model.onnx")
    return toc.Artifacts.load(folder)


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_equal_the_official_api(name: str, tmp_path: Path) -> None:
    artifacts = toc.Artifacts.load(DATA / name)
    data = batches(artifacts, 20)
    official = Official(artifacts, tmp_path)
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=1e-3)  # moments and step come from the checkpoint, as in ORT
    expected = [float(official.step(*batch)) for batch in data]
    assert train(model, optimizer, data) == expected
    for name, value in official.parameters():
        assert_same(model.named_tensors()[name], value)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("attributes", [{"weight_decay": 0.1}, {"adam_mode": 0, "weight_decay": 0.1}, {"correct_bias": 0}])
def test_the_graph_s_hyper_parameters_and_clipping_hold(tmp_path: Path, attributes: dict[str, Any], clip: float | None) -> None:
    artifacts = with_optimizer(tmp_path / "artifacts", clip=clip, **attributes)
    data = batches(artifacts, 10)
    official = Official(artifacts, tmp_path)
    official.optimizer.set_learning_rate(0.01)
    model, fused_model = toc.OrtModule(artifacts, threads=1), toc.OrtModule(artifacts, threads=1)
    graph, fused = toc.OrtOptimizer(model, lr=0.01), toc.OrtOptimizer(fused_model, lr=0.01, fused=True)
    expected = [float(official.step(*batch)) for batch in data]
    # ORT sums the norm in the order of a hash table: its own clipping differs in the last bit from process to process.
    assert train(model, graph, data) == (expected if clip is None else pytest.approx(expected, rel=1e-6))
    assert train(fused_model, fused, data) == pytest.approx(expected, rel=1e-5)
    for name, value in fused_model.named_tensors().items():
        torch.testing.assert_close(value, model.named_tensors()[name], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("source", "kind"), [(ADAMW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_to_torch_goes_on_with_the_same_mathematics(tmp_path: Path, source: Path, kind: type) -> None:
    artifacts = with_optimizer(tmp_path, source, adam_mode=0, weight_decay=0.05)
    data = batches(artifacts, 20)
    model = toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    train(model, optimizer, data[:10])
    twin = copy.deepcopy(model)
    twin_optimizer = toc.OrtOptimizer(twin, lr=0.5)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain = twin_optimizer.to_torch()
    assert type(plain) is kind
    assert train(twin, plain, data[10:]) == pytest.approx(train(model, optimizer, data[10:]), rel=1e-5)


def test_to_torch_is_refused_where_pytorch_has_no_such_mathematics(tmp_path: Path) -> None:
    with pytest.raises(toc.CheckpointError, match="adam_mode=1"):
        toc.OrtOptimizer(toc.OrtModule(ADAMW)).to_torch()
    with pytest.raises(toc.CheckpointError, match="clips"):
        toc.OrtOptimizer(toc.OrtModule(with_optimizer(tmp_path, clip=1.0, adam_mode=0))).to_torch()


def test_state_dict_is_exchanged_with_torch_adamw(tmp_path: Path) -> None:
    artifacts = with_optimizer(tmp_path, adam_mode=0)
    data = batches(artifacts, 12)
    model = toc.OrtModule(artifacts, threads=1)
    plain = torch.optim.AdamW(model.named_trainable().values(), lr=0.01, eps=1e-6, weight_decay=0.0, fused=True)
    train(model, plain, data[:4])
    ours = toc.OrtOptimizer(model)
    ours.load_state_dict(plain.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01
    assert ours.checkpoint_step == 4
    twin = copy.deepcopy(model)
    twin_plain = torch.optim.AdamW(twin.named_trainable().values(), fused=True)
    twin_plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert train(twin, twin_plain, data[4:]) == pytest.approx(train(model, ours, data[4:]), rel=1e-5)
    assert {int(state["step"]) for state in twin_plain.state.values()} == {12}


@pytest.mark.parametrize("fused", [False, True])
def test_schedulers_closures_hooks_and_frozen_parameters(fused: bool) -> None:
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    (batch,) = batches(model.artifacts, 1)
    model.fc1.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_trainable().items()}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        return loss

    expected = model(*batch).item()
    assert optimizer.step(closure).item() == expected
    assert torch.equal(model.fc1.weight, before["fc1.weight"])
    assert not torch.equal(model.fc2.weight, before["fc2.weight"])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    after = model.fc2.weight.clone()
    optimizer.step(closure)
    assert torch.equal(model.fc2.weight, after)  # a rate of zero from the scheduler reached the graph
    assert calls == ["before", "after"] * 2


def test_groups_with_rates_of_their_own_and_what_the_graph_can_not_do(tmp_path: Path) -> None:
    model = toc.OrtModule(ADAMW, threads=1)
    parameters = model.named_trainable()
    slow, fast = parameters["fc1.weight"], [value for name, value in parameters.items() if name != "fc1.weight"]
    optimizer = toc.OrtOptimizer(model, params=[{"params": [slow], "lr": 0.0}, {"params": fast, "lr": 0.1}])
    before = slow.detach().clone(), fast[0].detach().clone()
    train(model, optimizer, batches(model.artifacts, 2))
    assert torch.equal(slow, before[0])
    assert not torch.equal(fast[0], before[1])
    assert set(optimizer.groups()) == {"group0", "group1"}
    with pytest.raises(toc.CheckpointError, match="only parameters of the model"):
        toc.OrtOptimizer(model, params=[torch.nn.Parameter(torch.zeros(2))])
    clipping = toc.OrtModule(with_optimizer(tmp_path, clip=1.0))
    with pytest.raises(toc.CheckpointError, match="several groups"):
        toc.OrtOptimizer(clipping, params=[{"params": [value]} for value in clipping.named_trainable().values()])


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    """Also where no hook and no profiler watches the step."""
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer, ((x, y),) = toc.OrtOptimizer(model), batches(model.artifacts, 1)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(model(x, y))
        losses[-1].backward()
        return losses[-1]

    before = model.fc1.weight.clone()
    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert not torch.equal(model.fc1.weight, before)
    assert optimizer.step() is None
    assert len(losses) == 1


@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
def test_each_group_gets_its_own_rate_and_step_back(way: str, tmp_path: Path) -> None:
    def made(rates: tuple[float, float]) -> tuple[toc.OrtModule, toc.OrtOptimizer]:
        model = toc.OrtModule(ADAMW, threads=1)
        first, *others = model.named_trainable().values()
        return model, toc.OrtOptimizer(model, params=[{"params": [first], "lr": rates[0]}, {"params": others, "lr": rates[1]}])

    model, optimizer = made((0.02, 0.005))
    train(model, optimizer, batches(model.artifacts, 2))
    again, resumed = made((0.5, 0.6))
    if way == "state_dict":
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
    else:
        toc.save(model.checkpoint(optimizer), tmp_path / "checkpoint", groups="keep")
        again.load_checkpoint(tmp_path / "checkpoint", resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.005]
    assert resumed.checkpoint_step == optimizer.checkpoint_step
    for run in ((model, optimizer), (again, resumed)):
        train(*run, batches(model.artifacts, 2))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_hyper_parameters_of_a_group_replace_the_graph_s(tmp_path: Path) -> None:
    artifacts = with_optimizer(tmp_path, adam_mode=0)
    data = batches(artifacts, 8)
    model, twin = toc.OrtModule(artifacts, threads=1), toc.OrtModule(artifacts, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    optimizer.param_groups[0].update(betas=(0.5, 0.9), weight_decay=0.3)
    plain = torch.optim.AdamW(twin.named_trainable().values(), lr=0.01, betas=(0.5, 0.9), eps=1e-6, weight_decay=0.3)
    assert train(model, optimizer, data) == pytest.approx(train(twin, plain, data), rel=1e-5)


def test_one_cycle_changes_the_betas_too(tmp_path: Path) -> None:
    artifacts = with_optimizer(tmp_path, adam_mode=0)
    losses = []
    for make in (lambda m: toc.OrtOptimizer(m, lr=0.1), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-6, weight_decay=0.0)):
        model = toc.OrtModule(artifacts, threads=1)
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        losses.append([])
        for batch in batches(artifacts, 6):
            losses[-1] += train(model, optimizer, [batch])
            scheduler.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_grad_scaler_skips_an_overflow_and_unscales() -> None:
    model, reference = toc.OrtModule(ADAMW, threads=1), toc.OrtModule(ADAMW, threads=1)
    optimizer, plain = toc.OrtOptimizer(model), toc.OrtOptimizer(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    first, second = batches(model.artifacts, 2)
    before = model.fc2.weight.detach().clone()
    scaler.scale(model(*first)).backward()
    model.fc2.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.fc2.weight, before)
    optimizer.zero_grad()
    scaler.scale(model(*second)).backward()
    scaler.step(optimizer)
    train(reference, plain, [second])
    assert_same(model.fc2.weight, reference.fc2.weight)  # 512 and its inverse are powers of two: exact


def test_no_gradients_is_no_step() -> None:
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model)
    step = optimizer.checkpoint_step
    optimizer.step()
    assert optimizer.checkpoint_step == step


def test_a_graph_that_skips_says_so(tmp_path: Path) -> None:
    artifacts = with_optimizer(tmp_path)
    graph = onnx.load(artifacts.optimizer_path)
    graph.graph.initializer.append(onnx.helper.make_tensor("signal", onnx.TensorProto.BOOL, [1], [False]))
    graph.graph.node[0].input.append("signal")
    onnx.save(graph, artifacts.optimizer_path)
    model = toc.OrtModule(tmp_path, threads=1)
    optimizer = toc.OrtOptimizer(model)
    before = model.fc2.weight.detach().clone()
    train(model, optimizer, batches(model.artifacts, 1))
    assert optimizer.updated is False
    assert optimizer.checkpoint_step == 0
    assert torch.equal(model.fc2.weight, before)


def test_moments_are_torch_tensors_that_the_graph_updates_in_place() -> None:
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model)
    data = batches(model.artifacts, 3)
    train(model, optimizer, data[:1])
    weight = model.fc1.weight
    state = optimizer.state[weight]
    pointers = weight.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
    values, version = state["exp_avg"].clone(), weight._version
    train(model, optimizer, data[1:])
    assert pointers == (weight.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr())
    assert not torch.equal(state["exp_avg"], values)
    assert weight._version > version  # so that autograd detects a tensor saved before the update


def test_an_optimizer_can_be_copied_with_its_model() -> None:
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model, lr=0.01)
    data = batches(model.artifacts, 6)
    train(model, optimizer, data[:3])
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.model is twin_model
    assert train(twin_model, twin, data[3:]) == train(model, optimizer, data[3:])


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_for_all_optimizers_and_a_profiler_see_the_step_and_the_reset(fused: bool) -> None:
    model = toc.OrtModule(toc.Artifacts.load(ADAMW))
    optimizer = toc.OrtOptimizer(model, fused=fused)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    (batch,) = batches(model.artifacts, 1)
    train(model, optimizer, [batch])
    for handle in handles:
        handle.remove()
    assert calls == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, optimizer, [batch])
    assert {event.name for event in profile.events()} >= {
        "Optimizer.step#OrtOptimizer.step",
        "Optimizer.zero_grad#OrtOptimizer.zero_grad",
    }


def test_zero_grad_forgets_the_gradients_or_zeroes_them() -> None:
    model = toc.OrtModule(toc.Artifacts.load(ADAMW))
    optimizer = toc.OrtOptimizer(model)
    (batch,) = batches(model.artifacts, 1)
    model(*batch).backward()
    gradients = [parameter.grad for parameter in model.named_trainable().values()]
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.named_trainable().values(), gradients, strict=True))
    assert not any(gradient.any() for gradient in gradients if gradient is not None)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.named_trainable().values())


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_that_the_user_replaces_is_the_one_that_is_used(fused: bool) -> None:
    model = toc.OrtModule(toc.Artifacts.load(ADAMW))
    optimizer = toc.OrtOptimizer(model, fused=fused)
    batch, *_ = batches(model.artifacts, 1)
    train(model, optimizer, [batch, batch])
    first, second, *_ = optimizer.param_groups[0]["params"]
    before = optimizer.state[first]["exp_avg"]
    kept = before.clone()
    optimizer.state[first]["exp_avg"] = torch.zeros_like(before)
    optimizer.state[second] = {**optimizer.state[second], "exp_avg": torch.full_like(second.detach(), 0.5)}
    train(model, optimizer, [batch])
    assert torch.equal(before, kept)
    assert optimizer.state[first]["exp_avg"].abs().sum() > 0
    assert optimizer.state[second]["exp_avg"].mean() > 0.3
    optimizer.state[first]["exp_avg"].data = torch.zeros(first.shape)
    address = optimizer.state[first]["exp_avg"].data_ptr()
    train(model, optimizer, [batch])
    assert optimizer.state[first]["exp_avg"].data_ptr() == address
    assert optimizer.state[first]["exp_avg"].abs().sum() > 0
    optimizer.state.clear()
    train(model, optimizer, [batch])
    assert optimizer.checkpoint_step == 1


def test_the_module_is_found_inside_what_pytorch_wraps_around_it() -> None:
    model = toc.OrtModule(ADAMW, engine="torch")
    for wrapped in (torch.nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert toc.OrtOptimizer(wrapped).model is model
    with pytest.raises(toc.CheckpointError, match="expected an OrtModule"):
        toc.OrtOptimizer(torch.nn.Sequential(model, toc.OrtModule(ADAMW, engine="torch")))

"""`OrtModule` behaves as any `nn.Module` in a PyTorch training loop."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from tests.official import assert_same
from tests.runtime.gradients import assert_gradients, gradients, of_batch

pytestmark = pytest.mark.ort_any


def test_gradients_accumulate(model: toc.OrtModule) -> None:
    for seed in (0, 1, 2):
        model(*batch("mlp", seed=seed)).backward()
    one, two, three = of_batch(0), of_batch(1), of_batch(2)
    assert_gradients(model, {name: one[name] + two[name] + three[name] for name in one})


def test_train_step_accumulates_like_backward(model: toc.OrtModule) -> None:
    twin = copy.deepcopy(model)
    for seed in (0, 1, 2):
        loss = model.train_step(*batch("mlp", seed=seed))
        expected = twin(*batch("mlp", seed=seed))
        expected.backward()
        assert_same(loss, expected)
        assert not loss.requires_grad
    assert_gradients(model, gradients(twin))
    model.lazy_reset_grad()
    model.train_step(*batch("mlp", seed=3))
    assert_gradients(model, of_batch(3))
    kept = model.fc1.weight.grad
    model.zero_grad()
    model.train_step(*batch("mlp", seed=4))
    assert_gradients(model, of_batch(4))
    assert_same(kept, of_batch(3)["fc1.weight"])  # a gradient that the caller keeps is not overwritten


@pytest.mark.parametrize("scale", [0.5, 3.0, -1.0])
def test_a_scaled_loss_scales_the_gradients(model: toc.OrtModule, scale: float) -> None:
    (model(*batch("mlp")) * scale).backward()
    assert_gradients(model, {name: value * scale for name, value in of_batch(0).items()})


def test_several_forwards_before_one_backward(model: toc.OrtModule) -> None:
    losses = [model(*batch("mlp", seed=seed)) for seed in range(7)]  # more than the pool holds
    parts = [of_batch(seed) for seed in range(7)]
    losses[3].backward()
    assert_gradients(model, parts[3])
    model.zero_grad()
    (losses[0] + losses[5]).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, parts[0][name] + parts[5][name])


def test_gradients_of_earlier_steps_are_never_overwritten(model: toc.OrtModule) -> None:
    held = []
    for seed in range(8):
        model.zero_grad()
        model(*batch("mlp", seed=seed)).backward()
        held.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for seed, kept in enumerate(held):
        for name, value in of_batch(seed).items():
            assert_same(kept[name], value)


def test_memory_is_reused_and_gradients_are_not_copied(model: toc.OrtModule) -> None:
    pointers = set()
    for seed in range(10):
        model(*batch("mlp", seed=seed)).backward()
        pointers.add(model.fc1.weight.grad.untyped_storage().data_ptr())
        assert model.fc1.weight.grad.untyped_storage().data_ptr() == model.fc2.bias.grad.untyped_storage().data_ptr()
        model.zero_grad()
    assert len(pointers) == 1
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    optimizer = toc.OrtOptimizer(model)
    model(*batch("mlp")).backward()
    optimizer.step()
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_backward_twice_is_refused_unless_the_graph_is_kept(model: toc.OrtModule) -> None:
    loss = model(*batch("mlp"))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients(model, {name: value + value for name, value in of_batch(0).items()})
    with pytest.raises(toc.CheckpointError, match="second time"):
        loss.backward()


def test_an_abandoned_loss_gives_its_buffer_back(model: toc.OrtModule) -> None:
    for _ in range(20):
        model(*batch("mlp"))
    gc.collect()
    assert len(model.engine.training_graph().pool) == 1


def test_no_grad_and_eval_run_the_eval_graph() -> None:
    model, native = toc.OrtModule(exported("dropout"), threads=1), module("dropout").eval()
    x, y = batch("dropout")
    expected = F.cross_entropy(native(x), y)
    with torch.no_grad():
        loss = model(x, y)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.eval()(x, y), expected.detach())
    assert model.train()(x, y).item() != pytest.approx(loss.item())


def test_zero_grad_both_ways(model: toc.OrtModule) -> None:
    model(*batch("mlp")).backward()
    model.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    storage = model.fc1.weight.grad.data_ptr()
    model(*batch("mlp", seed=1)).backward()
    assert model.fc1.weight.grad.data_ptr() == storage
    assert_gradients(model, of_batch(1))
    model.zero_grad(set_to_none=True)
    assert model.fc1.weight.grad is None


def test_frozen_parameters(model: toc.OrtModule) -> None:
    model.fc1.requires_grad_(False)
    model(*batch("mlp")).backward()
    assert gradients(model).keys() == {"fc2.weight", "fc2.bias"}
    model.zero_grad()
    model.train_step(*batch("mlp"))
    assert gradients(model).keys() == {"fc2.weight", "fc2.bias"}
    frozen = toc.OrtModule(exported("mlp", frozen=("fc1.*",)), threads=1)
    frozen.fc1.weight.requires_grad_(True)
    with pytest.raises(toc.CheckpointError, match=r"fc1\.weight: requires a gradient"):
        frozen(*batch("mlp"))


def test_inputs_by_keyword_by_dict_and_wrong_ones(model: toc.OrtModule) -> None:
    x, y = batch("mlp")
    expected = model(x, y).item()
    assert model(x=x, labels=y).item() == expected
    assert model(x, labels=y).item() == expected
    assert model({"labels": y, "x": x}).item() == expected
    assert model(x.numpy(), y.numpy()).item() == expected
    with pytest.raises(toc.CheckpointError, match="no input 'z'"):
        model(x=x, labels=y, z=x)
    with pytest.raises(toc.CheckpointError, match="inputs missing: labels"):
        model(x)
    with pytest.raises(toc.CheckpointError, match="given twice"):
        model(x, y, x=x)
    with pytest.raises(toc.CheckpointError, match="3 inputs"):
        model(x, y, y)
    with pytest.raises(toc.CheckpointError, match="expected a tensor"):
        model(x, "labels")


def test_inputs_of_other_layouts_and_types(model: toc.OrtModule) -> None:
    x, y = batch("mlp")
    expected = model(x, y).item()
    assert model(x.t().contiguous().t(), y).item() == expected  # not contiguous
    assert model(torch.stack([x, x], 1)[:, 0], y).item() == expected
    assert model(x.double(), y.int()).item() == expected
    assert model((torch.complex(x, -x).conj()).imag, y).item() == expected  # lazily negated
    with pytest.raises(toc.CheckpointError, match="labels: is float32, the graph takes int64"):
        model(x, y.float())
    with pytest.raises(toc.CheckpointError, match="x: has size 5 in dimension 1, the graph takes 12"):
        model(x[:, :5], y)


def test_gradients_of_inputs_are_refused_with_a_reason(model: toc.OrtModule) -> None:
    x, y = batch("mlp")
    with pytest.raises(toc.CheckpointError, match="computes none for its inputs"):
        model(x.requires_grad_(), y)
    with torch.no_grad():
        model(x, y)


@pytest.mark.ort
def test_gradients_of_inputs_that_the_graph_provides(tmp_path: Path) -> None:
    source = exported("mlp", "torchscript").folder
    for name in ("eval_model.onnx", "checkpoint"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    graph = onnx.load(source / "training_model.onnx")
    (weight_gradient,) = [node for node in graph.graph.node if node.op_type == "Gemm" and "x" in node.input and "grad" in node.output[0]]
    (outer,) = [name for name in weight_gradient.input if name != "x" and name]
    graph.graph.node.append(onnx.helper.make_node("MatMul", [outer, "fc1.weight"], ["x_grad"]))
    graph.graph.output.append(onnx.helper.make_tensor_value_info("x_grad", onnx.TensorProto.FLOAT, ["batch", 12]))
    onnx.save(graph, tmp_path / "training_model.onnx")
    model, native = toc.OrtModule(tmp_path, threads=1), module("mlp")
    x, y = batch("mlp")
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (model(ours, y)[0] * 3).backward()
    (F.cross_entropy(native(theirs), y) * 3).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(model.fc1.weight.grad, native.fc1.weight.grad)
    model(x, y)[0].backward()  # without one, too


def test_extra_outputs_carry_no_gradient() -> None:
    model = toc.OrtModule(exported("mlp", extra_outputs=True), threads=1)
    x, y = batch("mlp")
    loss, logits = model(x, y)
    assert not logits.requires_grad
    loss.backward()
    assert_gradients(model, of_batch(0))
    kept = logits.clone()
    model(*batch("mlp", seed=1))
    assert torch.equal(logits, kept)
    assert len(model.eval()(x, y)) == 2


def test_deepcopy_and_pickle_share_nothing(model: toc.OrtModule) -> None:
    model(*batch("mlp")).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
        with torch.no_grad():
            twin.fc1.weight.zero_()
        assert model.fc1.weight.any()
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        twin(*batch("mlp", seed=1)).backward()
        assert_gradients(twin, of_batch(1))


def test_state_dict_round_trip_and_assign(model: toc.OrtModule) -> None:
    other = toc.OrtModule(exported("mlp"), threads=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    expected = other(*batch("mlp")).item()
    model.load_state_dict(other.state_dict())
    assert model(*batch("mlp")).item() == expected
    third = toc.OrtModule(exported("mlp"), threads=1)
    third(*batch("mlp"))
    third.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)  # replaces the Parameter objects
    assert third(*batch("mlp")).item() == expected
    native = module("mlp")
    native.load_state_dict(other.state_dict())
    assert F.cross_entropy(native(batch("mlp")[0]), batch("mlp")[1]).item() == pytest.approx(expected, rel=1e-5)


def test_swapped_data_and_replaced_parameters(model: toc.OrtModule) -> None:
    model(*batch("mlp"))
    native = module("mlp")
    with torch.no_grad():
        native.fc1.weight.mul_(2.0)
    model.fc1.weight.data = native.fc1.weight.detach().clone()
    expected = F.cross_entropy(native(batch("mlp")[0]), batch("mlp")[1]).item()
    assert model(*batch("mlp")).item() == pytest.approx(expected, rel=1e-6)
    model.fc1.weight = nn.Parameter(native.fc1.weight.detach().t().contiguous().t())  # not contiguous
    assert model(*batch("mlp")).item() == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        model.fc1.weight.zero_()  # a copy was bound: it must follow
        native.fc1.weight.zero_()
    assert model(*batch("mlp")).item() == pytest.approx(F.cross_entropy(native(batch("mlp")[0]), batch("mlp")[1]).item(), rel=1e-6)


def test_a_gradient_whose_data_was_replaced_is_not_taken_for_the_one_that_was_written(model: toc.OrtModule) -> None:
    for seed in range(8):
        model.train_step(*batch("mlp", seed=seed))
        assert_gradients(model, of_batch(seed))
        model.fc1.weight.grad.data = torch.zeros_like(model.fc1.weight)
        model.lazy_reset_grad()
    assert len(model.engine.training_graph().pool) == 1


@pytest.mark.parametrize("autograd", [False, True])
def test_shared_memory_moves_parameters_and_gradients(model: toc.OrtModule, autograd: bool) -> None:
    """`share_memory` moves the memory of the gradients too, while a binding still writes to the old one."""
    optimizer = toc.OrtOptimizer(model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    for seed in range(4):
        for one, own in ((model, optimizer), (twin_model, twin)):
            if autograd:
                one(*batch("mlp", seed=seed)).backward()
            else:
                one.train_step(*batch("mlp", seed=seed))
            own.step()
            if seed == 1 and one is model:
                one.share_memory()
                assert all(parameter.is_shared() and parameter.grad.is_shared() for parameter in one.parameters())
            one.zero_grad() if autograd else one.lazy_reset_grad()
    assert_same(model.fc1.weight, twin_model.fc1.weight)
    assert model.fc1.weight.is_shared()
    assert len(model.engine.training_graph().pool) == 1


def test_parameters_moved_to_another_type_are_refused(model: toc.OrtModule) -> None:
    model.to("cpu")
    model(*batch("mlp"))
    with pytest.raises(toc.CheckpointError, match="is float64 now"):
        model.double()(*batch("mlp"))
    model.float()(*batch("mlp"))


def test_tied_weights() -> None:
    model, native = toc.OrtModule(exported("tied"), threads=1), module("tied")
    x, y = batch("tied")
    model(x, y).backward()
    F.cross_entropy(native(x), y).backward()
    torch.testing.assert_close(model.embedding.weight.grad, native.embedding.weight.grad)
    # Tied by the user after loading: both places of the graph see one Parameter, whose gradient is the sum.
    plain = toc.OrtModule(exported("layernorm"), threads=1)
    apart = copy.deepcopy(plain)
    with torch.no_grad():
        apart.fc1.bias.copy_(apart.norm.bias)
    plain.fc1.bias = plain.norm.bias
    for run in (lambda m: m(*batch("layernorm")).backward(), lambda m: m.train_step(*batch("layernorm"))):
        plain.zero_grad()
        apart.zero_grad()
        run(plain)
        run(apart)
        torch.testing.assert_close(plain.norm.bias.grad, apart.norm.bias.grad + apart.fc1.bias.grad)
    for _ in range(3):
        plain.lazy_reset_grad()
        plain.train_step(*batch("layernorm"))
        torch.testing.assert_close(plain.norm.bias.grad, apart.norm.bias.grad + apart.fc1.bias.grad)


def test_symbolic_dimensions_can_be_fixed() -> None:
    artifacts = exported("mlp")
    assert artifacts.dimensions == ["batch"]
    model = toc.OrtModule(artifacts, dimensions={"batch": 4}, threads=1)
    assert model(*batch("mlp", size=4)).item() == toc.OrtModule(artifacts, threads=1)(*batch("mlp", size=4)).item()
    with pytest.raises(toc.CheckpointError, match="x: has size 5 in dimension 0, the graph takes 4"):
        model(*batch("mlp", size=5))
    with pytest.raises(toc.CheckpointError, match="no symbolic dimension 'time'"):
        toc.OrtModule(artifacts, dimensions={"time": 4})


def test_names_that_pytorch_would_refuse(model: toc.OrtModule) -> None:
    state = toc.CheckpointState(trainable={"a..b": torch.ones(2), "onnx::MatMul_1": torch.ones(1), "forward": torch.ones(3)})
    artifacts = toc.Artifacts.load(exported("mlp").folder)
    state.trainable |= dict(artifacts.state.trainable)
    model = toc.OrtModule(toc.Artifacts.load(artifacts.folder, checkpoint=state), threads=1)
    assert model.state_dict().keys() == state.trainable.keys()
    assert model.checkpoint().trainable.keys() == state.trainable.keys()
    model(*batch("mlp")).backward()

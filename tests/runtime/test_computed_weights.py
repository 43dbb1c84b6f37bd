"""Pruning, the older weight norm and parametrizations: what they compute is what the graph runs with, in every step and in eval()."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import torch_ort_ckpt as toc
from tests.models import batch, exported, module
from torch_ort_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.ort_any  # the artifacts are made by ORT's own tools

ENGINES = ["ort", "torch"]


def old_weight_norm(owner: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch has a newer one, and both must work
        nn.utils.weight_norm(owner, "weight")


def old_spectral_norm(owner: nn.Module) -> None:
    torch.manual_seed(3)  # where its iteration starts
    nn.utils.spectral_norm(owner, "weight", dim=0)


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "prune": lambda owner: prune.l1_unstructured(owner, "weight", amount=0.5),
    "prune twice": lambda owner: (prune.l1_unstructured(owner, "weight", amount=0.5), prune.ln_structured(owner, "weight", 0.25, 2, 0)),
    "weight_norm": old_weight_norm,
    "spectral_norm": old_spectral_norm,
    "parametrization": lambda owner: parametrizations.weight_norm(owner, "weight"),
}


def steps(model: Any, native: nn.Module, train: Callable[..., Any]) -> None:
    """Train both side by side, evaluating in between."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, native)]
    for seed in range(4):
        x, y = batch("mlp", 6, seed)
        train(model, x, y)
        F.cross_entropy(native(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        native.eval()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x, y), F.cross_entropy(native(x), y), rtol=1e-5, atol=1e-6)
        native.train()
        model.train()
    ours, theirs = model.state_dict(), native.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def by_autograd(model: Any, *inputs: torch.Tensor) -> None:
    model(*inputs).backward()


def by_step(model: Any, *inputs: torch.Tensor) -> None:
    model.train_step(*inputs)


def by_step_under_no_grad(model: Any, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        model.train_step(*inputs)


def by_lazy_reset(model: Any, *inputs: torch.Tensor) -> None:
    model.train_step(*inputs)
    model.lazy_reset_grad()
    model.train_step(*inputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("train", [by_autograd, by_step, by_step_under_no_grad])
def test_computed_weights_follow_their_originals(engine: str, kind: str, train: Callable[..., Any]) -> None:
    model, native = toc.OrtModule(exported("mlp"), engine=engine, threads=1), module("mlp")
    COMPUTED[kind](model.fc1)
    COMPUTED[kind](native.fc1)
    steps(model, native, train)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["prune", "weight_norm", "parametrization"])
def test_a_lazy_reset_reaches_the_originals(engine: str, kind: str) -> None:
    model, native = toc.OrtModule(exported("mlp"), engine=engine, threads=1), module("mlp")
    COMPUTED[kind](model.fc1)
    COMPUTED[kind](native.fc1)
    steps(model, native, by_lazy_reset)


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_of_a_pruned_model_compute_their_own_weights(engine: str) -> None:
    model = toc.OrtModule(exported("mlp"), engine=engine, threads=1)
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    with torch.no_grad():
        for name, one in {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}.items():
            native = module("mlp")
            prune.l1_unstructured(native.fc1, "weight", amount=0.5)
            one.fc1.weight_orig.add_(0.25)
            native.fc1.weight_orig.add_(0.25)
            x, y = batch("mlp", 6)
            torch.testing.assert_close(one.eval()(x, y), F.cross_entropy(native(x), y), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["prune", "weight_norm", "parametrization"])
def test_a_checkpoint_holds_the_value_as_it_is_now_and_is_not_put_into_a_computed_weight(kind: str) -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    before = model.checkpoint()
    values = {name: value.clone() for name, value in before.parameters.items()}
    COMPUTED[kind](model.fc1)
    with torch.no_grad():
        for name, parameter in model.fc1.named_parameters():
            if "orig" in name or "_v" in name or "_g" in name:
                parameter.mul_(3)
    x, y = batch("mlp", 6)
    expected = model.eval()(x, y)
    taken = model.checkpoint()
    other = toc.OrtModule(exported("mlp"), threads=1)
    other.load_checkpoint(taken)
    torch.testing.assert_close(other.eval()(x, y), expected, rtol=1e-6, atol=1e-7)
    before.trainable.update({name: values[name] for name in before.trainable})
    with pytest.raises(UnsupportedError, match=r"fc1\.weight: is computed"):
        model.load_checkpoint(before)
    session = toc.TrainingSession(exported("mlp"), threads=1)
    COMPUTED[kind](session.model.fc1)
    with pytest.raises(UnsupportedError, match="is computed"):
        session.set_state_tensors({"fc1.weight": values["fc1.weight"]})
    with pytest.raises(UnsupportedError, match="is computed"):
        session.copy_buffer_to_parameters(torch.zeros(session.get_parameters_size()))
    with pytest.raises(UnsupportedError, match="is computed"):
        session.checkpoint()


def test_pruning_made_permanent_leaves_an_ordinary_parameter() -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    x, y = batch("mlp", 6)
    expected = model.eval()(x, y)
    prune.remove(model.fc1, "weight")
    assert isinstance(model.fc1.weight, nn.Parameter)
    torch.testing.assert_close(model(x, y), expected, rtol=0, atol=0)
    model.load_checkpoint(model.checkpoint().clone())


REGISTER = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
]


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_that_is_never_called_says_so(register: str) -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    with pytest.warns(toc.CheckpointWarning, match=r"never called.*OrtModule itself") as caught:
        handle = getattr(model.fc1, register)(lambda *_: None)
    assert caught[0].filename == __file__
    handle.remove()
    called = []
    getattr(model, register.replace("register_backward", "register_full_backward"))(lambda *_: called.append(1))
    model(*batch("mlp")).backward()
    assert called


def test_parametrizations_need_no_hook() -> None:
    model = toc.OrtModule(exported("mlp"), threads=1)
    parametrizations.weight_norm(model.fc1, "weight")
    parametrize.remove_parametrizations(model.fc1, "weight")
    assert not model._table.hooked


def test_stages_of_a_pipeline_compute_them_too() -> None:
    native = module("mlp")
    stages = toc.pipeline_stages(exported("mlp"), 2)
    prune.l1_unstructured(stages.stages[0].fc1, "weight", amount=0.5)
    prune.l1_unstructured(native.fc1, "weight", amount=0.5)
    x, y = batch("mlp", 6)
    with torch.no_grad():
        for one in (stages.stages[0], native):
            one.fc1.weight_orig.add_(0.25)
        found = stages.loss(stages.stages[1](stages.stages[0](x)), y)
    torch.testing.assert_close(found, F.cross_entropy(native(x), y).detach(), rtol=1e-5, atol=1e-6)

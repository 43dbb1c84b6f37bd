"""`OrtModule` inside PyTorch loops: foreign optimizers, closures, averages, hooks, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc
from tests.models import batch, module
from tests.official import assert_same
from tests.runtime.gradients import of_batch

pytestmark = pytest.mark.ort_any


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_torch_optimizer_with_clipping_trains_it_like_the_native_module(model: toc.OrtModule, kind: type) -> None:
    native = module("mlp")
    optimizers = [kind(m.parameters(), lr=0.01) for m in (model, native)]
    for seed in range(5):
        x, y = batch("mlp", seed=seed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = model(x, y), F.cross_entropy(native(x), y)
        loss.backward()
        expected.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (model, native)]
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-4)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        for optimizer in optimizers:
            optimizer.step()


def test_lbfgs_closures(model: toc.OrtModule) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch("mlp"))
        loss.backward()
        return loss

    first = closure().item()
    optimizer.step(closure)
    assert closure().item() < first


def test_ema_of_the_weights(model: toc.OrtModule) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    first = model.fc1.weight.detach().clone()
    optimizer = toc.OrtOptimizer(model, lr=0.1)
    model(*batch("mlp")).backward()
    optimizer.step()
    average.update_parameters(model)
    torch.testing.assert_close(average.module.fc1.weight, (first + model.fc1.weight) / 2)
    average.eval()
    assert average(*batch("mlp")).item() != model.eval()(*batch("mlp")).item()


def test_hooks_autograd_grad_and_parametrizations(model: toc.OrtModule) -> None:
    calls = []
    model.fc1.weight.register_hook(lambda gradient: gradient * 2)
    model.fc2.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.shape))
    model(*batch("mlp")).backward()
    expected = of_batch(0)
    assert_same(model.fc1.weight.grad, expected["fc1.weight"] * 2)
    assert calls == [model.fc2.weight.shape]
    (gradient,) = torch.autograd.grad(model(*batch("mlp")), [model.fc2.bias])
    assert_same(gradient, expected["fc2.bias"])

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(model.fc2, "weight", Doubled())
    model.zero_grad()
    x, y = batch("mlp")
    native = module("mlp")
    with torch.no_grad():
        native.fc2.weight.mul_(2)
    loss = model(x, y)
    loss.backward()
    reference = F.cross_entropy(native(x), y)
    reference.backward()
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(model.fc2.parametrizations.weight.original.grad, native.fc2.weight.grad * 2)


def test_threads_do_not_mix_gradients(model: toc.OrtModule) -> None:
    expected = {seed: of_batch(seed)["fc1.weight"] for seed in range(8)}

    def one(seed: int) -> torch.Tensor:
        return torch.autograd.grad(model(*batch("mlp", seed=seed)), [model.fc1.weight])[0]

    with ThreadPoolExecutor(4) as workers:
        for _ in range(3):
            for seed, gradient in zip(expected, workers.map(one, expected), strict=True):
                assert_same(gradient, expected[seed])

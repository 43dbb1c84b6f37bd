"""What can't be made into a gradient graph is refused: with the operator or the reason, the line of the user's module, and a way out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc

HERE = Path(__file__).name
Function = Callable[[torch.Tensor], torch.Tensor]


class With(nn.Module):
    """A linear layer with a function behind it."""

    def __init__(self, function: Function, size: int = 4) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(size, size), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x))


def pinv(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.pinv(x.reshape(-1, 2, 2)).flatten(1)


def matrix_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(x.reshape(-1, 2, 2)).flatten(1)


def mode(x: torch.Tensor) -> torch.Tensor:
    return x * torch.mode(x, 1, keepdim=True).values


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x


def loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().amax().item())):
        x = torch.tanh(x)
    return x


OPERATORS = {pinv: r"linalg_\w+", matrix_exp: "linalg_matrix_exp", mode: r"aten\W+mode"}
CONTROL_FLOW = {branch: "if x.sum", loop: "for _ in range"}


def refusal(function: Function, folder: Path) -> str:
    with pytest.raises(toc.CheckpointError) as caught:
        toc.export_artifacts(With(function), (torch.randn(4, 4),), folder, "mse")
    assert not list(folder.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("function", OPERATORS, ids=lambda function: function.__name__)
def test_an_operator_without_translation_is_named_with_the_user_s_line(
    function: Function, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        text = refusal(function, tmp_path)
    assert re.search(OPERATORS[function], text), text
    assert HERE in text
    assert "register_decomposition" in text
    out, err = capfd.readouterr()
    printed = [line for line in (out + err).splitlines() if "torchvision" not in line]  # PyTorch's own notice about a missing package
    assert len(printed) < 10, printed
    assert len(text) < 1000


@pytest.mark.parametrize("function", CONTROL_FLOW, ids=lambda function: function.__name__)
def test_control_flow_that_depends_on_values_names_its_line(function: Function, tmp_path: Path) -> None:
    text = refusal(function, tmp_path)
    assert HERE in text
    assert CONTROL_FLOW[function] in text
    assert "torch.where" in text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_dynamic_length_of_a_recurrent_layer_names_its_line(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = kind(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)[0][:, -1]  # the layer

    with pytest.raises(toc.CheckpointError, match=r"'length'.*the module fixes it") as caught:
        toc.export_artifacts(Recurrent(), (torch.randn(2, 5, 3),), tmp_path, "mse", dynamic_shapes={"x": {0: "batch", 1: "length"}})
    assert "self.body(x)" in str(caught.value)


def test_a_decomposition_of_the_user_s_is_a_way_out(tmp_path: Path) -> None:
    from torch_ort_ckpt.graphs.gradients.decompositions import registry

    operator = torch.ops.aten.linalg_matrix_exp.default
    before = {name: dict(value) for name, value in vars(registry).items() if isinstance(value, dict) and not name.startswith("__")}

    @toc.register_decomposition(operator, before_autograd=True)  # its gradient is made of a larger one
    def series(x: torch.Tensor) -> torch.Tensor:
        total = term = torch.eye(2).expand_as(x)
        for place in range(1, 12):
            term = term @ x / place
            total = total + term
        return total

    try:
        net = With(lambda x: torch.linalg.matrix_exp(0.1 * x.reshape(-1, 2, 2)).flatten(1))
        made = toc.export_artifacts(net, (torch.randn(4, 4),), tmp_path, "mse")
    finally:
        for name, value in before.items():
            getattr(registry, name).clear()
            getattr(registry, name).update(value)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    model = toc.OrtModule(made, engine="torch")
    loss = model(x, y)
    expected = nn.functional.mse_loss(net(x), y)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(model.fc.weight.grad, net.fc.weight.grad, rtol=1e-4, atol=1e-6)

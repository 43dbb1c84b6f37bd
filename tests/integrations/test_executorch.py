"""ExecuTorch programs of training artifacts: loss and one step of SGD as OrtModule makes them, and back into a checkpoint."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, module
from torch_ort_ckpt.cli import main

pytestmark = pytest.mark.executorch
pytest.importorskip("executorch", reason="needs executorch (tox -e executorch)")

LR = 0.1


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(torch.relu(self.conv(x))).flatten(1))


@functools.cache
def artifacts(name: str) -> toc.Artifacts:
    made = Pooled() if name == "pool" else module(name)
    return toc.export_artifacts(made, values(name)[:1], Path(tempfile.mkdtemp()) / name, optimizer="sgd", extra_outputs=name == "mlp")


def values(name: str, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "pool":
        return torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))
    x, y = batch(name)
    return torch.cat([x] * size)[:size], torch.cat([y] * size)[:size]


def load(path: Path) -> Any:
    from executorch.extension.training import _load_for_executorch_for_training

    return _load_for_executorch_for_training(str(path))


def step(program: Any, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    from executorch.extension.training import get_sgd_optimizer

    outputs = program.forward_backward("forward", given)
    get_sgd_optimizer(program.named_parameters(), LR).step(program.named_gradients())
    return list(outputs)


@pytest.mark.parametrize("name", ["mlp", "pool", "cnn", "transformer"])
def test_two_steps_as_ort_module_makes_them(name: str, tmp_path: Path) -> None:
    toc.export_executorch(artifacts(name), tmp_path / "model.pte", largest=8)
    program = load(tmp_path / "model.pte")
    reference = toc.OrtModule(artifacts(name), engine="torch")
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    for size in (4, 7):  # the batch is dynamic
        given = values(name, size)
        result = reference(*given)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs = step(program, given)
        assert abs(outputs[0].item() - loss.item()) < 1e-5
        if isinstance(result, tuple):
            torch.testing.assert_close(outputs[1], result[1].detach(), atol=1e-5, rtol=1e-5)
        parameters = program.named_parameters()
        assert set(parameters) == {key for key, _ in reference.named_parameters()}
        for key, value in reference.named_parameters():
            torch.testing.assert_close(parameters[key], value.detach(), atol=1e-5, rtol=0, msg=key)
    names = program.model.run_method("torch_ort_ckpt_outputs", ())
    buffers = dict(zip(names, outputs, strict=True))
    for key, value in reference.named_buffers():
        if key in buffers:
            torch.testing.assert_close(buffers[key], value, atol=1e-5, rtol=0, msg=key)
    assert ("norm1.running_mean" in buffers) == (name == "cnn")


def test_parameters_come_back_into_a_checkpoint(tmp_path: Path) -> None:
    source = artifacts("cnn")
    toc.export_executorch(source, tmp_path / "model.pte")
    program = load(tmp_path / "model.pte")
    outputs = step(program, values("cnn"))
    buffers = dict(zip(program.model.run_method("torch_ort_ckpt_outputs", ())[1:], outputs[1:], strict=True))
    state = toc.from_torch({**toc.to_state_dict(source.state), **program.named_parameters(), **buffers}, like=source.state)
    toc.save(state, tmp_path / "checkpoint")
    again = toc.load(tmp_path / "checkpoint")
    assert again.trainable.keys() == source.state.trainable.keys()
    assert again.frozen.keys() == source.state.frozen.keys()
    for key, value in program.named_parameters().items():
        assert torch.equal(again.trainable[key], value)
        assert not torch.equal(again.trainable[key], source.state.trainable[key])
    assert torch.equal(again.frozen["norm1.running_mean"], buffers["norm1.running_mean"])
    native = module("cnn")
    native.load_state_dict(toc.to_state_dict(again))


def test_a_size_beyond_the_largest_is_an_error_of_the_runtime(tmp_path: Path) -> None:
    toc.export_executorch(artifacts("mlp"), tmp_path / "model.pte", largest={"batch": 4})
    load(tmp_path / "model.pte").forward_backward("forward", values("mlp", 4))
    with pytest.raises(RuntimeError):
        load(tmp_path / "model.pte").forward_backward("forward", values("mlp", 5))
    with pytest.raises(toc.CheckpointError, match="no open dimension 'height'"):
        toc.export_executorch(artifacts("mlp"), tmp_path / "other.pte", largest={"height": 4})
    with pytest.raises(toc.CheckpointError, match="at least 2"):
        toc.export_executorch(artifacts("mlp"), tmp_path / "other.pte", largest=1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["executorch", str(artifacts("mlp").folder), str(tmp_path / "model.pte"), "--largest", "8"]
    assert main(command) == 0
    assert "model.pte" in capsys.readouterr().out
    load(tmp_path / "model.pte").forward_backward("forward", values("mlp", 8))
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0

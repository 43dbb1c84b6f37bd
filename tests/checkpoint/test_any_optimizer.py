"""`OrtModule.checkpoint` with an optimizer of `torch.optim`, and state dicts for modules that lack the graph's constants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.models import batch, exported, module


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(*batch("mlp", seed=seed)).backward()
    optimizer.step()


def test_a_checkpoint_with_adamw_of_pytorch_continues(tmp_path: Path) -> None:
    model = toc.OrtModule(exported("mlp"), engine="torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for seed in range(3):
        _step(model, optimizer, seed)
    toc.save(model.checkpoint(optimizer), tmp_path / "ck")
    assert toc.load(tmp_path / "ck").optimizer["group0"].step == 3
    again = toc.OrtModule(exported("mlp"), engine="torch")
    other = torch.optim.AdamW(again.parameters())
    again.load_checkpoint(tmp_path / "ck", other)
    assert other.param_groups[0]["lr"] == 0.01
    assert tuple(other.param_groups[0]["betas"]) == (0.8, 0.9)
    for seed in range(3, 5):
        _step(model, optimizer, seed)
        _step(again, other, seed)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_state_dict_for_a_module_leaves_constants_out() -> None:
    native = module("mlp")
    state = toc.from_torch(native)
    state.frozen["graph_constant"] = torch.ones(2)
    with pytest.raises(RuntimeError, match="graph_constant"):
        native.load_state_dict(toc.to_state_dict(state))
    native.load_state_dict(toc.to_state_dict(state, module=native))
    wrapped = nn.DataParallel(native)
    wrapped.load_state_dict(toc.to_state_dict(state, module=wrapped))


def test_a_trained_weight_is_never_left_out() -> None:
    native = module("mlp")
    state = toc.from_torch(native)
    state.trainable["other.weight"] = torch.ones(2)
    with pytest.raises(toc.CheckpointError, match=r"has no other\.weight"):
        toc.to_state_dict(state, module=native)

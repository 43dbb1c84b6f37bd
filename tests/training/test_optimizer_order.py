"""Entries keep optimizer states by name: they go to the right parameters whatever order the optimizer has."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ort_ckpt as toc
from tests.training.setups import ADAMW, data_for, graph
from torch_ort_ckpt.training import capture


def trained(order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(list(model.parameters())[::order], lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_moments_go_to_their_parameters_in_another_order(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    manager = toc.CheckpointManager(tmp_path)
    manager.save(3, model, optimizer)
    other, turned = trained(-1)
    manager.restore(other, turned)
    for name, parameter in other.named_parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], optimizer.state[model.get_parameter(name)]["exp_avg"]), name


def test_groups_with_other_members_are_refused(tmp_path: Path) -> None:
    model, _ = trained(1)
    first, second = (list(part.parameters()) for part in model)
    toc.CheckpointManager(tmp_path).save(3, model, torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.5}]))
    with pytest.raises(toc.CheckpointError, match="does not fit"):
        toc.CheckpointManager(tmp_path).restore(model, torch.optim.AdamW([{"params": second}, {"params": first, "lr": 0.5}]))


@pytest.mark.ort
def test_an_entry_of_an_earlier_release_goes_to_the_right_parameters() -> None:
    """Entries of an earlier release: names, but no `param_names`, and the parameters in that release's order."""
    setup = graph()
    for x, y in list(data_for(setup))[:2]:
        setup.model(x, y).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    content = capture._named(copy.deepcopy(setup.optimizer.state_dict()), capture._names(setup.model, setup.optimizer))
    (group,) = content["param_groups"]
    del group["param_names"]
    group["params"].sort()
    model = toc.OrtModule(ADAMW, threads=1)
    optimizer = toc.OrtOptimizer(model)
    training = capture.Training(model, optimizer)
    capture._load_state_dicts(training, setup.model.state_dict(), content)
    for name, parameter in model.named_trainable().items():
        expected = setup.optimizer.state[setup.model.named_trainable()[name]]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], expected["exp_avg"])

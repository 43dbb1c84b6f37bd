"""A program as users write it. mypy checks it with the rest (`tox -e types`), and tests/test_public_api.py runs it."""

from __future__ import annotations

from pathlib import Path

import torch

import torch_ort_ckpt as toc


def round_trip(folder: Path) -> toc.DiffReport:
    """From PyTorch to a checkpoint and back."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state: toc.CheckpointState = toc.from_torch(model, optimizer, properties={"epoch": 1})
    toc.save(state, folder / "checkpoint", durable=False)
    loaded = toc.load(folder / "checkpoint", only=["*"])
    weights: dict[str, torch.Tensor] = toc.to_state_dict(loaded)
    model.load_state_dict(weights)
    step: int | None = loaded.step
    assert step == 1
    format: str = toc.detect(folder / "checkpoint")
    assert format == "ort"
    return toc.diff(loaded, toc.average([loaded, loaded]))


def specification() -> toc.OptimizerSpec:
    """As the documentation writes it: AdamW, with clipped gradients."""
    return toc.OptimizerSpec(max_norm=1.0)


def managed(folder: Path, model: torch.nn.Module) -> list[toc.Entry]:
    with toc.CheckpointManager(folder, max_num_checkpoints=2) as manager:
        manager.save(1, model)
        return manager.list()

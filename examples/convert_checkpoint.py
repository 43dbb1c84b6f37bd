"""An old device's checkpoint becomes PyTorch weights and optimizer state, safetensors, and a checkpoint for current ORT. Needs no ORT.

python examples/convert_checkpoint.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def old_checkpoint(path: Path) -> nn.Module:
    """What a device on ORT 1.16 would have left: weights under the exporter's names, one of them transposed, and Adam's moments."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    names = toc.NameMap.from_dict({"onnx::MatMul_12": {"name": "0.weight", "transpose": True}})
    toc.save(toc.from_torch(model, optimizer, names=names, properties={"epoch": 3}), path, version=1)
    return model


def main(folder: Path) -> nn.Module:
    """The model as PyTorch has it in the end."""
    old_checkpoint(folder / "checkpoint")

    state = toc.load(folder / "checkpoint")  # any format, detected
    print(f"read {toc.detect(folder / 'checkpoint')} version {state.format_version}: {state}")

    model = network()
    names = toc.NameMap.match(state, model)  # by name, then by shape, then by value; what stays open is reported, not guessed
    print(names.report())
    model.load_state_dict(toc.to_state_dict(state, names))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, names, module=model))
    print(f"PyTorch goes on at step {state.step} with lr {optimizer.param_groups[0]['lr']}")

    toc.convert(folder / "checkpoint", folder / "model.safetensors", names=names)  # torch names; moments in a file beside it
    toc.convert(folder / "model.safetensors", folder / "upgraded")
    print(f"model.safetensors holds {sorted(toc.load(folder / 'model.safetensors').parameters)}")
    print(f"for ORT 1.18 and later: {toc.load(folder / 'upgraded')}")
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))

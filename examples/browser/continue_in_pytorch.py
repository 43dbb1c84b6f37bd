"""Go on in PyTorch with what the browser trained: read the downloaded `state.safetensors`, and make one more step.

python examples/browser/continue_in_pytorch.py ~/Downloads/state.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from make_model import SIZE, Digits
from torch.nn import functional as F

import torch_ort_ckpt as toc


def main(path: Path, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[Digits, float]:
    state = toc.load(path)
    (group,) = state.optimizer.values()
    print(f"{path.name}: {group.step} updates in the browser, learning rate {group.lr}")
    net = Digits()
    net.load_state_dict(toc.to_state_dict(state))
    optimizer = torch.optim.AdamW(net.parameters(), lr=group.lr or 1e-3)
    optimizer.load_state_dict(toc.to_optimizer_state_dict(state, optimizer, module=net))
    loss = F.cross_entropy(net(pixels), labels)
    loss.backward()
    optimizer.step()
    print(f"the next step in PyTorch: loss {loss.item():.4f}")
    return net, loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.rand(4, 1, SIZE, SIZE), torch.arange(4))

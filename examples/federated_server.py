"""A federated-learning server: receive checkpoints from devices, refuse broken ones, average the rest, ship one back. Needs no ORT.

python examples/federated_server.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort_ckpt as toc

DEVICES = (120, 40, 80)  # samples on each


def main(folder: Path, rounds: int = 5) -> list[float]:
    """The global model's accuracy after each round."""
    torch.manual_seed(0)
    toc.save(toc.from_torch(network()), folder / "global")
    accuracies = []
    for number in range(rounds):
        uploads = [train_on_device(folder, device, broken=number == 1 and device == 2) for device in range(len(DEVICES))]

        # The server's part. It never builds the model: checkpoints are enough.
        good = [(path, samples) for path, samples in zip(uploads, DEVICES, strict=True) if toc.verify(path)]
        for path in sorted(set(uploads) - {path for path, _ in good}):
            print(f"  {path.name}: left out, {toc.verify(path).problems[0]}")
        mean = toc.average([path for path, _ in good], weights=[samples for _, samples in good])
        change = max(item.relative or 0 for item in toc.diff(folder / "global", mean) if item.name.startswith("trainable/"))
        toc.save(mean, folder / "global", include_optimizer=False)

        accuracies.append(accuracy(folder / "global"))
        print(f"round {number}: {len(good)} devices, largest relative change {change:.2f}, accuracy {accuracies[-1]:.3f}")
    return accuracies


# What the devices do, in PyTorch here; on a phone this is ORT with the same files.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(3, 8, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(count, 8, generator=generator), labels


def train_on_device(folder: Path, device: int, broken: bool) -> Path:
    model = network()
    model.load_state_dict(toc.to_state_dict(toc.load(folder / "global")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = data(DEVICES[device], seed=device)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if broken:  # a device whose training diverged
        torch.nn.init.constant_(model[0].weight, float("nan"))
    path = folder / f"upload_{device}"
    toc.save(toc.from_torch(model, optimizer), path)
    return path


def accuracy(checkpoint: Path) -> float:
    model = network()
    model.load_state_dict(toc.to_state_dict(toc.load(checkpoint)))
    x, y = data(600, seed=1000)
    return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))

"""What saving and resuming cost a training: ratios, measured interleaved.

    python -m benchmarks.training [--megabytes 96] [--resume-megabytes 1024] [--rounds 5] [--folder /tmp]

- background save: what `async_save` costs the loop beyond copying the state once, against what the synchronous save costs it;
- runner: `TrainingRunner` against the same loop written by hand;
- resume: `CheckpointManager.restore` (every byte verified) against reading the entry's files once.

Each figure is the least of its rounds: differences of long times drown in the noise of a busy machine otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_ort_ckpt as toc
from benchmarks.timing import interleaved, table
from torch_ort_ckpt.training.capture import Training, capture

WIDTH = 1024


def make(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of square layers whose weights and moments have about this size together."""
    torch.manual_seed(0)
    layers = max(1, megabytes * (1 << 20) // 3 // (4 * WIDTH * WIDTH))
    model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def background(megabytes: int, rounds: int, folder: Path) -> list[str]:
    """Each contender trains the same number of steps, long enough for a save to finish behind them, and saves once at the start."""
    model, optimizer = make(megabytes)
    x = torch.randn(64, WIDTH)
    update(model, optimizer, x)
    managers = {
        name: toc.CheckpointManager(folder / name, max_num_checkpoints=1, async_save=name == "background", durable=True)
        for name in ("at once", "background")
    }
    step = 0

    def loop(save: Callable[[], Any]) -> None:
        nonlocal step
        step += 1
        save()
        for _ in range(STEPS):
            update(model, optimizer, x)

    contenders = {
        "none": lambda: loop(lambda: None),
        "copy": lambda: loop(lambda: capture(Training(model, optimizer)).clone()),
        **{name: (lambda manager=manager: loop(lambda: manager.save(step, model, optimizer))) for name, manager in managers.items()},
    }
    seconds = interleaved(contenders, rounds, between=managers["background"].wait, pick=min)
    managers["background"].close()
    at_once = seconds["at once"] - seconds["none"]
    copy, behind = seconds["copy"] - seconds["none"], seconds["background"] - seconds["none"]
    return [f"{megabytes} MB", f"{at_once:.2f} s", f"{copy:.2f} s", f"{behind:.2f} s", f"{max(0.0, behind - copy) / at_once:.1%}"]


STEPS = 12


def runner(rounds: int) -> list[str]:
    """Two hundred steps of a small transformer, with accumulation and clipping."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(8 * 200, 16, 128), torch.randint(0, 8, (8 * 200,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])

    def by_hand() -> None:
        for number, batch in enumerate(loader):
            (loss(model, batch) / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    def by_runner() -> None:
        config = toc.RunnerConfig(200, gradient_accumulation_steps=2, max_grad_norm=1.0)
        toc.TrainingRunner(model, optimizer, config, loss=loss).run(loader)

    seconds = interleaved({"by hand": by_hand, "runner": by_runner}, rounds, pick=min)
    return [
        f"{1000 * seconds['by hand'] / 200:.2f} ms",
        f"{1000 * seconds['runner'] / 200:.2f} ms",
        f"{seconds['runner'] / seconds['by hand']:.3f}",
    ]


def resume(megabytes: int, rounds: int, folder: Path, cold: bool) -> list[str]:
    model, optimizer = make(megabytes)
    update(model, optimizer, torch.randn(4, WIDTH))
    manager = toc.CheckpointManager(folder / "resume", durable=True)
    manager.save(1, model, optimizer)
    entry = manager.latest()
    if entry is None:
        raise SystemExit("the entry is gone")
    files = [entry.path / name for name in entry.files]

    buffer = bytearray(entry.nbytes)

    def read() -> None:
        view, done = memoryview(buffer), 0
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while got := file.readinto(view[done : done + (64 << 20)]):
                    done += got

    def forget() -> None:
        if cold:
            for path in files:
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    seconds = interleaved({"read": read, "restore": lambda: manager.restore(model, optimizer)}, rounds, between=forget, pick=min)
    where = "from the medium" if cold else "from the page cache"
    size = f"{entry.nbytes / (1 << 30):.2f} GB"
    return [size, where, f"{seconds['read']:.2f} s", f"{seconds['restore']:.2f} s", f"{seconds['restore'] / seconds['read']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--resume-megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the writer has the other cores
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        row = background(options.megabytes, options.rounds, folder)
        print(table("Background save", ["state", "at once", "copying once", "in the background", "beyond the copy / at once"], [row]))
        print(table("Runner", ["step by hand", "step in the runner", "ratio"], [runner(options.rounds)]))
        rows = [resume(options.resume_megabytes, options.rounds, folder, cold) for cold in (False, True)]
        print(table("Resume", ["entry", "read", "reading once", "restore", "ratio"], rows))


if __name__ == "__main__":
    main()

"""Speed and memory of the checkpoint core against safetensors and ORT's own reader and writer.

    python -m benchmarks.checkpoints [--megabytes 1024] [--rounds 5] [--folder /tmp]

Times are the least of interleaved rounds (another guest of the machine can only make a round slower); files are in the page cache and
nothing is synced. Memory is the growth of the peak resident set of a fresh process, read from the kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch

import torch_ort_ckpt as toc
from benchmarks.timing import interleaved, table

BLOCK: dict[str, tuple[int, ...]] = {
    **{f"attention.{name}.weight": (1024, 1024) for name in ("query", "key", "value", "output")},
    **{f"attention.{name}.bias": (1024,) for name in ("query", "key", "value", "output")},
    "feed.up.weight": (4096, 1024),
    "feed.up.bias": (4096,),
    "feed.down.weight": (1024, 4096),
    "feed.down.bias": (1024,),
    **{f"norm{number}.{name}": (1024,) for number in (1, 2) for name in ("weight", "bias")},
}
"""One block of a transformer of width 1024, as in BERT-large: 16 tensors, 48 MiB."""


def make_state(megabytes: int, optimizer: bool) -> toc.CheckpointState:
    """Transformer blocks of about this size, all told, with AdamW's moments where asked for."""
    generator = torch.Generator().manual_seed(1)
    share = 3 if optimizer else 1
    state = toc.CheckpointState()
    for number in range(max(1, round(megabytes / share / 48))):
        for name, shape in BLOCK.items():
            state.trainable[f"layers.{number}.{name}"] = torch.rand(shape, generator=generator)
    if optimizer:
        states = {
            name: {moment: torch.rand(value.shape, generator=generator) for moment in ("momentum0", "momentum1")}
            for name, value in state.trainable.items()
        }
        state.optimizer["group0"] = toc.OptimizerGroup(step=5, states=states)
    return state


def flat(state: toc.CheckpointState) -> dict[str, torch.Tensor]:
    return dict(state.tensors())


def timing_rows(megabytes: int, rounds: int, folder: Path, optimizer: bool) -> list[list[str]]:
    state = make_state(megabytes, optimizer)
    tensors = flat(state)
    ours, theirs, ort_file = folder / "ours", folder / "theirs.safetensors", folder / "ort"
    toc.save(state, ours, durable=False)
    safetensors.torch.save_file(tensors, theirs)
    what = "with moments" if optimizer else "weights only"
    rows = []

    def add(task: str, seconds: dict[str, float], own: str = "torch_ort_ckpt") -> None:
        for peer, value in seconds.items():
            if peer != own:
                rows.append([what, task, peer, f"{seconds[own] * 1e3:.1f} ms", f"{value * 1e3:.1f} ms", f"{seconds[own] / value:.3f}"])

    load = {"torch_ort_ckpt": lambda: toc.load(ours), "safetensors.torch.load_file": lambda: safetensors.torch.load_file(theirs)}
    touch = {
        "torch_ort_ckpt": lambda: [value.sum() for _, value in toc.load(ours).tensors()],
        "safetensors.torch.load_file": lambda: [value.sum() for value in safetensors.torch.load_file(theirs).values()],
    }
    save = {
        "torch_ort_ckpt": lambda: toc.save(state, folder / "out", durable=False),
        "safetensors.torch.save_file": lambda: safetensors.torch.save_file(tensors, folder / "out.safetensors"),
    }
    if importlib.util.find_spec("onnxruntime"):
        from onnxruntime.training.api import CheckpointState

        loaded = CheckpointState.load_checkpoint(str(ours))
        CheckpointState.save_checkpoint(loaded, str(ort_file), True)
        load["ORT load_checkpoint"] = lambda: CheckpointState.load_checkpoint(str(ort_file))
        save["ORT save_checkpoint"] = lambda: CheckpointState.save_checkpoint(loaded, str(folder / "out.ort"), True)
    add("load", interleaved(load, rounds, pick=min))
    add("load and read every tensor", interleaved(touch, rounds, pick=min))
    clean = lambda: [place.unlink() for place in folder.glob("out*")]  # noqa: E731 - a fresh file for every save
    add("save, no fsync", interleaved(save, rounds, clean, min))
    write_alone = {
        "torch_ort_ckpt": lambda: toc.convert(ours, folder / "out.safetensors", durable=False, verify=False),
        "toc.save of the same state": lambda: toc.save(state, folder / "out.safetensors", format="safetensors", durable=False),
    }
    add("convert ort -> safetensors, not verified", interleaved(write_alone, rounds, clean, min))
    verified = {**write_alone, "torch_ort_ckpt": lambda: toc.convert(ours, folder / "out.safetensors", durable=False)}
    add("convert ort -> safetensors, read back and compared", interleaved(verified, rounds, clean, min))
    for place in folder.iterdir():
        place.unlink()
    return rows


MEASURED = {
    "save": "s = make_state({mb}, True); start(); toc.save(s, r'{folder}/out', durable=False)",
    "convert": "start(); toc.convert(r'{folder}/source', r'{folder}/out.safetensors', durable=False)",
    "average": "start(); toc.average([r'{folder}/source'] * 20)",
}
_PRELUDE = """
import torch_ort_ckpt as toc
from benchmarks.checkpoints import make_state, reset_peak, read_peak, read_now
base = 0
def start():
    global base
    reset_peak(); base = read_now()
"""


def reset_peak() -> None:
    """Linux: start a new peak of the resident set."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def read_peak() -> int:
    return _status("VmHWM")


def read_now() -> int:
    return _status("VmRSS")


def memory_rows(megabytes: int, folder: Path) -> list[list[str]]:
    """Peak memory beyond what was there at the start, each in a fresh process."""
    rows = []
    model = make_state(megabytes, True)
    toc.save(model, folder / "source", durable=False)
    size = sum(value.nbytes for _, value in model.tensors())
    del model
    for name, body in MEASURED.items():
        code = _PRELUDE + body.format(mb=megabytes, folder=folder) + "\nprint(read_peak() - base)"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        extra = int(output.split()[-1])
        rows.append([name, f"{size / 2**20:.0f} MiB", f"{extra / 2**20:.0f} MiB", f"{extra / size:.1%}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="toc-bench-", dir=options.folder))
    try:
        header = ["state", "task", "peer", "ours", "peer's", "ratio"]
        rows = [row for optimizer in (False, True) for row in timing_rows(options.megabytes, options.rounds, folder, optimizer)]
        print(table(f"Time, {options.megabytes} MiB, torch {torch.__version__}, {os.cpu_count()} cores", header, rows), flush=True)
        if sys.platform == "linux":
            rows = memory_rows(options.megabytes, folder)
            print(table("Memory beyond the start of the call", ["task", "state", "peak growth", "of the state"], rows))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

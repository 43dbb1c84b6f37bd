"""What it costs to export artifacts of a transformer with 12 layers and about 100 million parameters: seconds and peak memory by stage.

    python -m benchmarks.export_large [--layers 12] [--width 768] [--plain]

Memory is the peak of the process beyond what it held before the module was made, relative to the size of the weights (which are in it).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc
from benchmarks.gradients import resident


class Encoder(nn.Module):
    """A language model's encoder with a classifier behind it."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.encoder(self.embedding(x)).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=20000)
    parser.add_argument("--plain", action="store_true", help="optimize=False")
    options = parser.parse_args()
    before = resident("VmRSS")
    module = Encoder(options.layers, options.width, options.words)
    size = sum(value.numel() * value.element_size() for value in module.parameters()) / 2**20
    print(f"{sum(value.numel() for value in module.parameters()) / 1e6:.0f}M parameters, {size:.0f} MB")
    start, cpu = time.perf_counter(), time.process_time()

    def tell(stage: str) -> None:
        spent = f"{time.perf_counter() - start:6.1f} s, CPU {time.process_time() - cpu:6.1f} s"
        print(f"{spent}, peak so far {(resident('VmHWM') - before) / size:.2f} x the weights: {stage}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        example = torch.randint(0, options.words, (2, 16))
        toc.export_artifacts(module, (example,), Path(folder), optimize=not options.plain, progress=tell)
    tell("done")


if __name__ == "__main__":
    main()

"""Write the model that the page trains: `model/step_model.onnx` and `model/state.safetensors`.

Then install the runtime and serve the folder:

python examples/browser/make_model.py
cd examples/browser
npm install onnxruntime-web
python -m http.server --bind 127.0.0.1 8000
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_ort_ckpt as toc

SIZE = 28


class Digits(nn.Module):
    """A small convolutional network for drawings of 28 x 28 points."""

    def __init__(self) -> None:
        super().__init__()
        # Strides instead of MaxPool2d: its gradient needs the places of the maxima, which WebGPU kernels of onnxruntime-web 1.30 lack.
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.classifier = nn.Linear(16 * 7 * 7, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(pixels).flatten(1))


def main(folder: Path) -> Digits:
    torch.manual_seed(0)
    net = Digits()
    with tempfile.TemporaryDirectory() as work:
        example = (torch.zeros(2, 1, SIZE, SIZE),)
        # The page shows what the network thinks of a drawing: it needs the module's output beside the loss.
        artifacts = toc.export_artifacts(net, example, work, loss="cross_entropy", optimizer="adamw", extra_outputs=True)
        toc.export_step_model(artifacts, folder, overwrite=True)
    print(f"wrote {folder / 'step_model.onnx'} and {folder / 'state.safetensors'}")
    return net


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model")

"""The page that trains in a browser, and its JavaScript module in Node: the losses of PyTorch, and a state that PyTorch goes on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import torch_ort_ckpt as toc

from ..browser import Page, browser
from .javascript import installed, served

pytestmark = pytest.mark.clients

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
STEPS, LR = 12, 0.003
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield import_module("make_model")
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def site(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a user has it: with a model and the runtime."""
    folder = tmp_path_factory.mktemp("site")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    example.main(folder / "model")
    (folder / "node_modules").symlink_to(installed("onnxruntime-web"))
    return folder


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(10, 1, 28, 28, generator=generator)
    labels = [torch.randint(0, 10, (8,), generator=generator) for _ in range(STEPS)]
    return [(pixels[y] * (0.5 + 0.5 * torch.rand(8, 1, 28, 28, generator=generator)), y) for y in labels]


def native(net: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference(example: ModuleType) -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(0)
    net = example.Digits()
    return net, native(net)


def check(path: Path, example: ModuleType, losses: list[float]) -> None:
    """The losses, and the state behind them, are PyTorch's."""
    net, expected = reference(example)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0]
    state = toc.load(path)
    (group,) = state.optimizer.values()
    assert group.step == STEPS
    assert group.lr == pytest.approx(LR)
    for name, value in net.named_parameters():
        torch.testing.assert_close(torch.as_tensor(state.trainable[name]), value.detach(), atol=1e-4, rtol=1e-3)
    x, y = batches()[0]
    loss = import_module("continue_in_pytorch").main(path, x, y)[1]
    assert loss == pytest.approx(F.cross_entropy(net(x), y).item(), abs=1e-3)
    toc.convert(path, path.with_name("checkpoint"), to_format="ort")
    assert toc.load(path.with_name("checkpoint")).optimizer["group0"].step == STEPS


def train_in(page: Page) -> list[float]:
    """The page's own function for a batch, with these batches."""
    for x, y in batches():
        pixels = json.dumps([round(value, 7) for value in x.flatten().tolist()])
        page.evaluate(f"digits.trainBatch(Float32Array.from({pixels}), {y.tolist()}, {LR})")
    return list(page.evaluate("digits.losses"))


def opened(page: Page, address: str) -> None:
    page.look(width=1400)
    page.open(f"{address}/index.html")
    page.evaluate("digits.ready")
    assert page.evaluate("document.getElementById('status').textContent") == "Ready."


def downloaded(page: Page, folder: Path) -> Path:
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.click("#download")
    path = folder / "state.safetensors"
    for _ in range(600):
        if path.exists() and not list(folder.glob("*.crdownload")):
            return path
        time.sleep(0.1)
    raise AssertionError(f"nothing was downloaded: {page.errors}")


@pytest.mark.browser
def test_the_page_trains_as_pytorch_does(site: Path, example: ModuleType, tmp_path: Path) -> None:
    with served(site) as address, browser(tmp_path / "profile") as page:
        opened(page, address)
        losses = train_in(page)
        check(downloaded(page, tmp_path), example, losses)
        assert page.errors == []
        assert all(url.startswith((address, "data:", "blob:", "about:")) for url in page.requests)


@pytest.mark.browser
def test_what_a_user_does(site: Path, tmp_path: Path) -> None:
    with served(site) as address, browser(tmp_path / "profile") as page:
        opened(page, address)
        assert page.evaluate("document.getElementById('train').disabled")
        for _ in range(2):
            page.drag("#pad", [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)])
            page.click("#labels button:nth-child(2)")
            page.drag("#pad", [(0.3, 0.2), (0.7, 0.2), (0.4, 0.8)])
            page.click("#labels button:nth-child(8)")
        assert page.evaluate("digits.drawings.map((d) => d.label)") == [1, 7, 1, 7]
        page.click("#train")
        page.evaluate("new Promise((done) => { const look = () => digits.losses.length >= 50 ? done() : setTimeout(look, 50); look(); })")
        losses = page.evaluate("digits.losses")
        assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        page.drag("#pad", [(0.52, 0.15), (0.5, 0.5), (0.48, 0.85)])
        odds = page.evaluate("new Promise((done) => setTimeout(() => done(digits.guess()), 300))")
        assert max(range(10), key=odds.__getitem__) == 1
        assert page.evaluate("document.querySelectorAll('#gallery figure').length") == 4
        assert page.evaluate("document.querySelector('#curve .mean').points.numberOfItems") == 50
        for width in (1400, 400):
            page.look(width=width)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        state = toc.load(downloaded(page, tmp_path))
        assert state.optimizer["group0"].step == 50
        assert page.errors == []


@pytest.mark.browser
def test_webgpu_trains_as_pytorch_does_or_is_refused(site: Path, example: ModuleType, tmp_path: Path) -> None:
    with served(site) as address, browser(tmp_path / "profile", *WEBGPU) as page:
        opened(page, address)
        if not page.evaluate("(async () => navigator.gpu && await navigator.gpu.requestAdapter() !== null)()"):
            pytest.skip("this chromium has no WebGPU adapter")
        message = page.evaluate("digits.start('webgpu').then(() => '', (error) => error.message)")
        if message:  # onnxruntime-web 1.30 on SwiftShader: a gradient is wrong
            assert "otherwise than WebAssembly does here" in message
            assert page.evaluate("digits.backend") == "wasm"
        else:
            assert page.evaluate("digits.backend") == "webgpu"
        check(downloaded_after(page, tmp_path), example, page.evaluate("digits.losses"))


def downloaded_after(page: Page, folder: Path) -> Path:
    """The state after the batches: a backend that was refused leaves the page working."""
    train_in(page)
    return downloaded(page, folder)


@pytest.mark.parametrize(("package", "entry"), [("onnxruntime-web", "dist/ort.node.min.mjs"), ("onnxruntime-node", "dist/index.js")])
def test_the_module_in_node(package: str, entry: str, site: Path, example: ModuleType, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    data = [{"pixels": x.flatten().tolist(), "labels": y.tolist()} for x, y in batches()]
    (tmp_path / "data.json").write_text(json.dumps(data))
    shutil.copy(EXAMPLE / "step_trainer.js", tmp_path / "step_trainer.mjs")
    (tmp_path / "run.mjs").write_text(f"""
import {{ readFileSync, writeFileSync }} from "node:fs";
import {{ StepTrainer }} from "./step_trainer.mjs";
const library = await import({json.dumps((installed(package) / package / entry).as_uri())});
const ort = library.default?.InferenceSession ? library.default : library;
const folder = {json.dumps(str(site / "model"))};
const trainer = await StepTrainer.create(ort, readFileSync(folder + "/step_model.onnx"), readFileSync(folder + "/state.safetensors"));
const losses = [];
for (const {{ pixels, labels }} of JSON.parse(readFileSync("data.json"))) {{
  const batch = {{
    pixels: new ort.Tensor("float32", Float32Array.from(pixels), [labels.length, 1, 28, 28]),
    labels: new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [labels.length]),
  }};
  const before = await trainer.evaluate(batch);
  const {{ loss }} = await trainer.step(batch, {LR});
  if (Math.abs(before.loss - loss) > 1e-6) throw new Error("evaluate differs from step");
  losses.push(loss);
}}
writeFileSync("state.safetensors", await trainer.save());
writeFileSync("losses.json", JSON.stringify(losses));
""")
    done = subprocess.run(["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "state.safetensors", example, json.loads((tmp_path / "losses.json").read_text()))

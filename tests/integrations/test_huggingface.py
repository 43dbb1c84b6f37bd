"""transformers.Trainer and accelerate with an `OrtModule`: the same numbers as the loop by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ort_ckpt as toc
from tests.models import batch, exported

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error::torch_ort_ckpt.CheckpointWarning"),
]

ENGINES = [pytest.param("ort", marks=pytest.mark.ort), "torch"]
SIZE, WINDOW, UPDATES, RATE = 16, 4, 3, 0.5


def model(engine: str, name: str = "mlp", **options: Any) -> toc.OrtModule:
    return toc.OrtModule(exported(name, extra_outputs=True), engine=engine, seed=0, **options)


def rows() -> list[dict[str, Any]]:
    """One window of batches; `idx` is a column that the graph does not take."""
    return [{"x": x, "labels": y, "idx": place} for place, (x, y) in enumerate(zip(*batch("mlp", size=SIZE), strict=True))]


def trainer(subject: Any, folder: Path, *, optimizer: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {
        "per_device_train_batch_size": SIZE // WINDOW,
        "gradient_accumulation_steps": WINDOW,
        "max_steps": UPDATES,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    metrics = options.pop("compute_metrics", None)
    return Trainer(
        subject,
        TrainingArguments(output_dir=str(folder), **{**settings, **quiet, **options}),
        train_dataset=rows(),
        eval_dataset=rows(),
        optimizers=(optimizer or torch.optim.SGD(subject.parameters(), lr=RATE), None),
        compute_metrics=metrics,
    )


def by_hand(subject: Any, optimizer: torch.optim.Optimizer, updates: int = UPDATES) -> None:
    """Each window is the whole data, so that the order of samples does not matter."""
    for _ in range(updates):
        for x, y in zip(*(part.chunk(WINDOW) for part in batch("mlp", size=SIZE)), strict=True):
            (subject(x, y)[0] / WINDOW).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_trained_alike(mine: Any, theirs: Any) -> None:
    start = model("torch").state_dict()
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(start["fc2.bias"], mine.state_dict()["fc2.bias"], atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_accumulates_as_the_loop_by_hand(engine: str, tmp_path: Path) -> None:
    mine, theirs = model(engine), model(engine)
    by_hand(mine, torch.optim.SGD(mine.parameters(), lr=RATE))
    run = trainer(theirs, tmp_path)
    assert not run.model_accepts_loss_kwargs  # else gradients would not be divided by the window
    run.train()
    assert_trained_alike(mine, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_reports_the_loss_and_metrics_of_the_evaluation(engine: str, tmp_path: Path) -> None:
    subject = model(engine).eval()
    with torch.no_grad():
        loss, logits = subject(*batch("mlp", size=SIZE))

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    found = trainer(subject, tmp_path, compute_metrics=accuracy).evaluate()
    assert found["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx((logits.argmax(-1) == batch("mlp", size=SIZE)[1]).float().mean().item())


@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_with_a_graph_that_has_only_the_loss(engine: str, tmp_path: Path) -> None:
    mine = model(engine)
    by_hand(mine, torch.optim.SGD(mine.parameters(), lr=RATE))
    theirs = toc.OrtModule(exported("mlp"), engine=engine, return_dict=True)
    run = trainer(theirs, tmp_path)
    run.train()
    assert_trained_alike(mine, theirs)
    with torch.no_grad():
        loss = mine.eval()(*batch("mlp", size=SIZE))[0].item()
    assert run.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.ort
def test_trainer_with_the_optimizer_graph(tmp_path: Path) -> None:
    mine, theirs = model("ort"), model("ort")
    by_hand(mine, toc.OrtOptimizer(mine, lr=0.01))
    optimizer = toc.OrtOptimizer(theirs, lr=0.01)
    trainer(theirs, tmp_path, optimizer=optimizer, learning_rate=0.01).train()
    assert_trained_alike(mine, theirs)
    assert theirs.checkpoint(optimizer).step == UPDATES


@pytest.mark.ort
def test_trainer_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    whole = model("ort")
    trainer(whole, tmp_path / "whole", optimizer=toc.OrtOptimizer(whole, lr=0.01), learning_rate=0.01, max_steps=4).train()
    half = model("ort")
    options = {"learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2}
    trainer(half, tmp_path / "half", optimizer=toc.OrtOptimizer(half, lr=0.01), max_steps=2, **options).train()
    again = model("ort")
    run = trainer(again, tmp_path / "half", optimizer=toc.OrtOptimizer(again, lr=0.01), max_steps=4, **options)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 4
    assert_trained_alike(whole, again)


@pytest.mark.ort
def test_accelerate_accumulates_saves_and_goes_on(tmp_path: Path) -> None:
    from accelerate import Accelerator

    def prepared() -> tuple[Any, Any, Any, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
        subject = model("ort")
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch("mlp", size=SIZE)), batch_size=SIZE // WINDOW)
        return accelerator, *accelerator.prepare(subject, toc.OrtOptimizer(subject, lr=0.01), loader)

    def train(accelerator: Any, subject: Any, optimizer: Any, loader: Any, updates: int) -> None:
        for _ in range(updates):
            for x, y in loader:
                with accelerator.accumulate(subject):
                    accelerator.backward(subject(x, y)[0])
                    optimizer.step()
                    optimizer.zero_grad()

    mine = model("ort")
    by_hand(mine, toc.OrtOptimizer(mine, lr=0.01), updates=4)
    first = prepared()
    train(*first, updates=2)
    first[0].save_state(str(tmp_path / "state"))
    second = prepared()
    second[0].load_state(str(tmp_path / "state"))
    train(*second, updates=2)
    subject = second[0].unwrap_model(second[1])
    assert isinstance(subject, toc.OrtModule)
    assert_trained_alike(mine, subject)


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_accelerate_in_mixed_precision_keeps_the_signature() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    subject = model("torch")
    wrapped = accelerator.prepare(subject)
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "labels"]
    loss = wrapped(*batch("mlp"))[0]
    torch.testing.assert_close(loss, model("torch")(*batch("mlp"))[0], rtol=0.02, atol=0.02)
    assert accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False) is subject
    assert subject(*batch("mlp"))[0] == model("torch")(*batch("mlp"))[0]


@pytest.mark.ort
def test_a_trainer_s_weights_may_replace_those_of_the_folder(tmp_path: Path) -> None:
    subject = model("ort")
    subject.save_pretrained(tmp_path / "model")
    run = trainer(subject, tmp_path / "run")
    run.train()
    run.save_model(str(tmp_path / "model"))  # plain weights: nothing says which are trained
    again = toc.OrtModule.from_pretrained(tmp_path / "model", engine="ort")
    assert_trained_alike(subject, again)
    assert list(again.named_trainable()) == list(subject.named_trainable())

"""Names come from files: their control characters never reach a terminal or a log."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.errors import CorruptFileError, printable
from torch_ort_ckpt.storage.files import warn

EVIL = "a\x1b]0;title\x07\x1b[31m\x9b2J\u202eb\r\n\x7f[bold]c"


def harmless(text: str) -> str:
    bad = sorted({c for c in text if not c.isprintable() and c != "\n"})
    assert not bad, [hex(ord(c)) for c in bad]
    assert "\\x1b" in text or "\\u001b" in text, text  # the name is there
    text.encode()
    return text


def state(value: float = 1.0) -> toc.CheckpointState:
    made = toc.CheckpointState({EVIL: torch.full((2,), value)}, properties={EVIL: EVIL, "n": value})
    made.optimizer[EVIL] = toc.OptimizerGroup(1, states={EVIL: {EVIL: torch.full((2,), value)}}, hyperparameters={EVIL: EVIL})
    return made


def texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, (list, dict)):
        for item in [*content, *(content.values() if isinstance(content, dict) else ())]:
            yield from texts(item)


def test_errors_are_harmless_in_every_part() -> None:
    error = CorruptFileError(f"what {EVIL}", path=f"/tmp/{EVIL}", field=EVIL, remedy=f"Do {EVIL}.")
    assert harmless(str(error)).count("\n") == 0
    harmless(repr(error))
    assert error.field == EVIL  # as it is in the file


def test_warnings_are_harmless() -> None:
    with pytest.warns(toc.CheckpointWarning) as seen:
        warn(f"left out: {EVIL}")
    assert "\n" not in harmless(str(seen[0].message))
    with pytest.warns(toc.CheckpointWarning) as seen:
        warn("x" * 100_000)
    assert len(str(seen[0].message)) < 2000


def test_descriptions_are_harmless() -> None:
    harmless(repr(state()))
    harmless(repr(state().optimizer[EVIL]))
    report = toc.diff(state(), state(2.0))
    assert len(harmless(str(report)).splitlines()) == 1 + len(report)
    for item in report:
        assert "\n" not in str(item)
    assert any(item.name == f"trainable/{EVIL}" for item in report)  # as it is in the file
    harmless(str(toc.diff(state(), toc.CheckpointState())))


def test_verify_is_harmless(tmp_path: Path) -> None:
    toc.save(state(float("nan")), tmp_path / "a", groups="keep")
    result = toc.verify(tmp_path / "a")
    assert result.problems
    for problem in result.problems:
        assert "\n" not in harmless(problem)


def test_readers_warn_harmlessly(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{"lr": 1.0, "params": [0], EVIL: {1}}]}},
        tmp_path / "a.pt",
    )
    dcp.save({"w": torch.ones(2), EVIL: 3}, checkpoint_id=tmp_path / "b", no_dist=True)
    torch.save({"model": {"w": torch.ones(2)}, EVIL: torch.ones(2)}, tmp_path / "c.ort.pt")
    for name in ("a.pt", "b", "c.ort.pt"):
        with pytest.warns(toc.CheckpointWarning) as seen:
            toc.load(tmp_path / name)
        for item in seen:
            harmless(str(item.message))


def test_the_command_line_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [onnx.numpy_helper.from_array(torch.ones(1).numpy(), "other")]))
    onnx.save(model, tmp_path / "m.onnx")
    for name, value in (("a", 1.0), ("b", 2.0), ("nan", float("nan"))):
        toc.save(state(value), tmp_path / name, groups="keep")
    a, b, bad = (str(tmp_path / name) for name in ("a", "b", "nan"))
    commands: list[list[str]] = [
        ["inspect", a],
        ["inspect", a, "--json"],
        ["diff", a, b],
        ["diff", a, b, "--json"],
        ["verify", bad],
        ["verify", bad, "--json"],
        ["average", a, a, "-o", str(tmp_path / "o"), "--groups", "keep"],
        ["convert", a, str(tmp_path / "c.pt")],
        ["convert", a, str(tmp_path / "c.runner")],
        ["convert", a, str(tmp_path / "n.onnx"), "--model", str(tmp_path / "m.onnx")],
    ]
    seen = ""
    for command in commands:
        with warnings.catch_warnings():
            main(command)
        out, err = capsys.readouterr()
        for text in (out, err):
            bad_characters = {c for c in text if not c.isprintable() and c != "\n"}
            assert not bad_characters, (command, bad_characters)
        if "--json" in command:
            assert command[0] == "verify" or any(EVIL in text for text in texts(json.loads(out)))  # programs get the name itself
        seen += out + err
    harmless(seen)


def test_printable_keeps_ordinary_text() -> None:
    for text in ("layer.0/weight", "имя 名前 é 🙂", "", "a b"):
        assert printable(text) == text

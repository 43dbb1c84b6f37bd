"""A stock build: the installed one, or a training build of which only what stock builds have is used."""

from __future__ import annotations

import dataclasses

import pytest

from torch_ort_ckpt.engines.ort import build, dlpack, engine, graph_updates, prepared, sequences, sessions

USERS = (dlpack, engine, graph_updates, prepared, sequences, sessions)
"""The modules that ask what the build can do."""


def pretend(monkeypatch: pytest.MonkeyPatch, **facts: object) -> build.Build:
    """Let the build lack what these facts say."""
    changed = dataclasses.replace(build.installed(), **facts)  # type: ignore[arg-type]
    for module in (build, *USERS):
        monkeypatch.setattr(module, "installed", lambda: changed)
    return changed


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> build.Build:
    return pretend(monkeypatch, trains=False)

"""The documentation: every block runs, every link leads somewhere, every public name is in the reference."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli import main
from torch_ort_ckpt.cli.demo import data, demo, network
from torch_ort_ckpt.formats import FORMATS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def parameters() -> list[object]:
    def needs(page: Path) -> list[pytest.MarkDecorator]:
        return [getattr(pytest.mark, name) for name in re.findall(r"^<!-- needs: (\w+) -->$", page.read_text(), re.MULTILINE)]

    return [pytest.param(page, id=str(page.relative_to(DOCS)), marks=needs(page)) for page in PAGES if BLOCK.search(page.read_text())]


@pytest.fixture(scope="module")
def from_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `torch-ort-ckpt demo artifacts` leaves."""
    folder = tmp_path_factory.mktemp("demo")
    for stage in demo(folder):
        stage.run()
    return folder


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `artifacts` in it; without ORT only the trained checkpoint."""
    folder = tmp_path / "artifacts"
    if request.node.get_closest_marker("ort"):
        shutil.copytree(request.getfixturevalue("from_demo"), folder)
    else:
        folder.mkdir()
        model, (inputs, labels) = network(), data()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        toc.save(toc.from_torch(model, optimizer), folder / "trained")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", parameters())
@pytest.mark.filterwarnings("ignore")  # pages show what warns, too
def test_every_block_runs(page: Path, place: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        language, code = block.groups()
        line = text[: block.start()].count("\n") + 1
        if language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        else:
            assert language == "sh", f"{page}:{line}: neither python nor sh"
            for command in code.splitlines():
                words = shlex.split(command, comments=True)
                if words[:2] == ["torch-ort-ckpt", "demo"]:
                    shutil.rmtree(place / words[2])  # this page makes it itself
                if words and words[0] == "torch-ort-ckpt":
                    assert main(words[1:]) in (0, 1), command


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).is_file():
                broken.append(f"{page.relative_to(DOCS)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert [str(page.relative_to(DOCS)) for page in PAGES if page.relative_to(DOCS).as_posix() not in navigation] == []


def test_every_format_has_a_page() -> None:
    assert [name for name in FORMATS if not (DOCS / "formats" / f"{name}.md").is_file()] == []


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text()
    assert [name for name in toc.__all__ if f"::: torch_ort_ckpt.{name}\n" not in reference] == []


def test_the_messages_under_troubleshooting_are_the_library_s() -> None:
    texts = [
        node.value
        for path in Path(toc.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    messages = re.findall(r"^## `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 20
    unknown = [part for message in messages for part in message.split("...") if not any(part.strip() in text for text in texts)]
    assert unknown == []

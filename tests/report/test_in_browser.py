"""The pages in a real browser: they sort and filter, fetch nothing, and can be read on a phone and in dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import report

from ..browser import Page, browser

pytestmark = pytest.mark.browser

NAMES = "[...document.querySelectorAll('#tensors tbody td.name')].map((cell) => cell.textContent)"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    generator = torch.Generator().manual_seed(0)
    sizes = {"layers.10.weight": (8, 4), "layers.2.weight": (64, 16), "layers.2.bias": (64,), "head.weight": (3, 8)}
    state = toc.CheckpointState(trainable={name: torch.randn(size, generator=generator) for name, size in sizes.items()})
    state.frozen[HOSTILE] = torch.tensor([1.0, math.nan])
    moments = {
        name: {"momentum0": torch.randn(size, generator=generator), "momentum1": torch.rand(size, generator=generator)}
        for name, size in sizes.items()
    }
    state.optimizer["group0"] = toc.OptimizerGroup(3, states=moments)
    toc.save(state, folder / "a")
    moved = state.clone()
    moved.trainable["layers.2.weight"] += 0.1
    toc.save(moved, folder / "b")
    report.write(report.inspection(folder / "a"), folder / "inspect.html")
    report.write(report.comparison(folder / "a", folder / "b")[0], folder / "diff.html")
    with toc.CheckpointManager(folder / "run") as manager:
        model = torch.nn.Linear(3, 2)
        for step in (1, 1000):
            manager.save(step, model, metrics={"loss": 1 / step})
    report.write(report.run_page([folder / "run", folder / "a"]), folder / "run.html")
    return {name: folder / f"{name}.html" for name in ("inspect", "diff", "run")}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, pages: dict[str, Path]) -> Page:
    tab.look(width=1280)
    tab.open(pages["inspect"])
    return tab


def test_a_click_on_a_header_sorts_and_another_turns_it_round(page: Page) -> None:
    page.click("#tensors th:nth-child(5) button")  # size, largest first
    largest_first = page.evaluate(NAMES)
    assert largest_first[0] == "layers.2.weight"
    assert page.evaluate("document.querySelector('#tensors th:nth-child(5)').getAttribute('aria-sort')") == "descending"
    page.click("#tensors th:nth-child(5) button")
    assert page.evaluate(NAMES) == largest_first[::-1]
    page.click("#tensors th:nth-child(1) button")
    names = page.evaluate(NAMES)
    assert names.index("layers.2.bias") < names.index("layers.10.weight")  # numbers in names count as numbers


def test_typing_filters_by_every_word(page: Page) -> None:
    page.type("#filter", "LAYERS weight")
    assert sorted(page.evaluate(NAMES)) == ["layers.10.weight", "layers.2.weight"]
    assert page.evaluate("document.getElementById('shown').textContent") == "2 of 5"
    page.type("#filter", "64\u00d716")
    assert page.evaluate(NAMES) == ["layers.2.weight"]
    page.type("#filter", "nothing like it")
    assert page.evaluate(NAMES) == []


def test_nan_is_marked_and_can_be_singled_out(page: Page) -> None:
    assert page.evaluate("document.querySelectorAll('#tensors tr.bad').length") == 1
    page.click("#problems")
    assert page.evaluate(NAMES) == [HOSTILE]
    assert page.evaluate("document.querySelector('tr.bad td.problem').textContent") == "1 NaN"


def test_all_charts_are_drawn(page: Page, pages: dict[str, Path]) -> None:
    charts = "[...document.querySelectorAll('[data-chart]')].map((section) => section.dataset.chart)"
    assert sorted(page.evaluate(charts)) == ["bars", "scatter", "treemap"]
    assert page.evaluate("document.querySelectorAll('.tile').length") == 5
    assert page.evaluate("document.querySelectorAll('circle').length") == 8  # four weights with two moments each
    assert page.evaluate("document.querySelectorAll('#tensors .spark').length") == 4  # the fifth has one finite value
    sizes = "[...document.querySelectorAll('{}')].map((e) => [+e.getAttribute('width'), +e.getAttribute('height')])"
    ((width, height),) = page.evaluate(sizes.format("[data-chart=treemap] svg"))
    tiles = page.evaluate(sizes.format(".tile rect"))
    assert sum((w + 2) * (h + 2) for w, h in tiles) == pytest.approx(width * height, rel=0.01)  # they fill it, a gap of 2 between them
    page.open(pages["diff"])
    bars = "[...document.querySelectorAll('.bar')].map((e) => [+e.querySelector('rect').getAttribute('width'), e.textContent])"
    assert "layers.2.weight: " in max(page.evaluate(bars))[1]


def test_nothing_is_fetched_and_nothing_fails(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["diff"])
    # The page's own policy stops even a script that tries.
    blocked = "new Promise((tell) => document.addEventListener('securitypolicyviolation', (event) => tell(event.blockedURI)))"
    page.evaluate(f"window.blocked = {blocked}; fetch('http://localhost:9/').catch(() => 0)")
    assert page.evaluate("window.blocked") == "http://localhost:9/"
    assert {address.partition(":")[0] for address in page.requests} == {"file"}
    assert page.errors == []
    assert page.evaluate("document.querySelector('img')") is None


def test_what_changed_most_comes_first(tab: Page, pages: dict[str, Path]) -> None:
    tab.look(width=1280)
    tab.open(pages["diff"])
    assert tab.evaluate(NAMES)[0] == "layers.2.weight"
    assert tab.evaluate("document.querySelector('.bar text').textContent") == "layers.2.weight"


def test_layers_open_with_their_totals(page: Page) -> None:
    lines = "[...document.querySelectorAll('#tree > * b')].map((b) => b.textContent)"
    assert page.evaluate(lines) == ["head.weight", "layers", HOSTILE]
    page.click("#tree > details > summary")
    assert page.evaluate("[...document.querySelectorAll('#tree > details b')].map((b) => b.textContent)") == ["layers", "10.weight", "2"]
    assert "3 tensors" in page.evaluate("document.querySelector('#tree > details > summary').textContent")
    assert page.evaluate("document.querySelectorAll('#tree .leaf .spark').length") > 0


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", ["inspect", "diff", "run"])
def test_no_column_is_cut(tab: Page, pages: dict[str, Path], name: str, width: int) -> None:
    tab.look(width=width)
    tab.open(pages[name])
    assert tab.evaluate("(() => { const e = document.querySelector('.wide'); return e.scrollWidth - e.clientWidth; })()") == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_a_run_is_drawn_as_curves(tab: Page, pages: dict[str, Path]) -> None:
    tab.look(width=1280)
    tab.open(pages["run"])
    titles = "[...document.querySelectorAll('[data-chart=lines] h2')].map((e) => e.textContent)"
    assert tab.evaluate(titles)[0] == "loss"
    assert "norm of all weights" in tab.evaluate(titles)
    assert tab.evaluate("document.querySelectorAll('[data-chart=lines] polyline').length") >= 3
    assert tab.evaluate("document.getElementById('noun').textContent") == "Checkpoints"
    assert tab.errors == []


@pytest.mark.parametrize("name", ["inspect", "diff"])
def test_it_fits_a_phone(tab: Page, pages: dict[str, Path], name: str) -> None:
    tab.look(width=360, height=740)
    tab.open(pages[name])
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    wide = (
        "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 361).map((e) => e.outerHTML.slice(0, 90))"
    )
    assert tab.evaluate(wide) == []
    fonts = "[...document.querySelectorAll('td, dd, dt, select, input, text')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    assert min(tab.evaluate(fonts)) >= 12
    tab.evaluate("(() => { const s = document.getElementById('order'); s.value = 'bytes down'; s.dispatchEvent(new Event('change')); })()")
    assert tab.evaluate(NAMES)[0].startswith("layers.2.weight")


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_background(tab: Page, pages: dict[str, Path], dark: bool) -> None:
    tab.look(width=1280, dark=dark)
    tab.open(pages["inspect"])
    colours = (
        "['h1', '#subtitle', 'dt', 'dd', 'td.name', 'td.problem', 'th button'].map((s) => { let e = document.querySelector(s);"
        " if (s === 'td.problem') e = document.querySelector('tr.bad td.problem');"
        " const text = getComputedStyle(e).color; let back = 'rgba(0, 0, 0, 0)';"
        " while (back === 'rgba(0, 0, 0, 0)') { back = getComputedStyle(e).backgroundColor; e = e.parentElement; }"
        " return [text, back]; })"
    )
    pairs = tab.evaluate(colours)
    assert all(contrast(text, back) >= 4.5 for text, back in pairs), pairs
    assert (brightness(pairs[0][1]) < 0.1) == dark


def brightness(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((brightness(a), brightness(b)))
    return (high + 0.05) / (low + 0.05)

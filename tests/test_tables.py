"""Tables of names and numbers, each compared with the package or the code that gives them their meaning."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt import formats, report
from torch_ort_ckpt.catalog import DTYPES, WRITABLE
from torch_ort_ckpt.graphs.translation.registry import supported_ops

PAGE = (Path(report.__file__).parent / "page.js").read_text()


@pytest.mark.parametrize(("number", "name"), DTYPES.items())
def test_element_types_have_the_numbers_and_names_of_onnx_and_pytorch(number: int, name: str) -> None:
    assert isinstance(getattr(torch, name), torch.dtype)
    assert onnx.helper.tensor_dtype_to_np_dtype(number).name == name


def test_operators_of_the_standard_domain_are_operators_of_onnx() -> None:
    names = supported_ops()[""]
    assert len(names) > 100
    # ONNX Runtime has this one in the standard domain, though no release of ONNX defines it
    assert [name for name in names if not onnx.defs.has(name)] == ["SimplifiedLayerNormalization"]


@pytest.mark.ort
def test_every_exception_of_onnx_runtime_is_known() -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    from torch_ort_ckpt.graphs.onnxruntime_package import ort_errors

    own = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(own) > 5
    assert [kind for kind in own if not issubclass(kind, ort_errors())] == []


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".dcp", ".distcp", ".ortcp"])
def test_a_suffix_chooses_its_format(suffix: str, tmp_path: Path) -> None:
    place = tmp_path / f"x{suffix}"
    toc.save(toc.CheckpointState({"w": torch.ones(2)}), place, durable=False)
    expected = {".safetensors": "safetensors", ".dcp": "dcp", ".distcp": "dcp", ".ortcp": "ortcp"}.get(suffix, "torch")
    assert formats.detect(place) == expected
    assert expected in WRITABLE


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("pages")
    for name in "ab":
        moments = toc.OptimizerGroup(1, states={"w": {"momentum0": torch.rand(3, 2), "momentum1": torch.rand(3, 2)}})
        toc.save(toc.CheckpointState({"w": torch.rand(3, 2)}, optimizer={"group0": moments}), folder / name, durable=False)
    return [report.inspection(folder / "a"), report.comparison(folder / "a", folder / "b")[0]]


@pytest.mark.parametrize("number", [0, 1], ids=["inspection", "comparison"])
def test_a_page_is_described_in_the_words_of_its_script(number: int, pages: list[dict[str, list[dict[str, object]]]]) -> None:
    """`page.js` skips a chart or a column that it does not know."""
    page = pages[number]
    used = set(re.findall(r"content\.(\w+)", PAGE))
    assert {"title", "subtitle", "facts", "columns", "rows", "charts", "tables"} <= set(page) <= used
    if "tree" in page:
        tree: dict[str, str] = page["tree"]  # type: ignore[assignment]
        assert {tree[word] for word in ("size", "measure", "against") if word in tree} <= {key for row in page["rows"] for key in row}
    (table,) = re.findall(r"^const FORMATS = \{(.*)\};$", PAGE, re.MULTILINE)
    formats_of_columns = set(re.findall(r"(?:^|,) (\w+)", table))
    assert {"bytes", "number", "percent", "shape"} <= formats_of_columns
    assert {column["type"] for column in page["columns"]} <= formats_of_columns | {"text", "histogram", "problem"}
    keys = {key for row in page["rows"] for key in row}
    for column in page["columns"]:
        assert set(column) == {"key", "label", "type"}
        assert column["key"] in keys
    words = {
        "bars": {"type", "title", "value"},
        "scatter": {"type", "title", "x", "xlabel", "ys", "ylabel"},
        "treemap": {"type", "title", "size", "colour"},
    }
    for chart in page["charts"]:
        assert set(chart) == words[str(chart["type"])]
        for word in ("value", "x", "size", "colour"):
            assert chart.get(word, "name") in keys
        assert set(chart.get("ys", ())) <= keys  # type: ignore[call-overload]

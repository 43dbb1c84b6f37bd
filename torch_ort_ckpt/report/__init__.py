"""One self-contained page about a checkpoint, two, or a run: for a browser without network. Behind `inspect --html`, `diff --html` and
`checkpoints --html`.

`inspection`, `comparison` and `run_page` describe the page as plain data (rows, columns, charts); `page.js` draws any such description.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from ..storage.files import atomic_write
from ..storage.paths import PathLike, as_path, refuse_existing
from .comparison import comparison
from .inspection import inspection
from .runs import points, run_page

__all__ = ["comparison", "inspection", "points", "render", "run_page", "write"]


def write(content: dict[str, Any], path: PathLike, *, overwrite: bool = False) -> None:
    """Write the page. An existing file is replaced only with `overwrite`."""
    refuse_existing(as_path(path), overwrite)
    with atomic_write(path) as file:
        file.write(render(content).encode())


def render(content: dict[str, Any]) -> str:
    """The page as text. Names come from files, so they are inserted as data, never as markup."""
    data = json.dumps(_plain(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = _asset("page.html")
    for name, text in (("style", _asset("page.css")), ("script", _asset("page.js")), ("data", data)):
        before, _, after = page.partition(f"%{name}%")
        page = before + text + after
    return page


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _plain(content: Any) -> Any:
    """What JSON can hold: NaN and infinity become null (they are counted elsewhere), lone surrogates a replacement."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {_plain(str(key)): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else content

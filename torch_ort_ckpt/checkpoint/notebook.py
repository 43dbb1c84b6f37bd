"""Small HTML tables for notebooks (`_repr_html_`). Names come from files, so all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..errors import printable

MAX_ROWS = 50
"""Longer tables end with the number of rows left out."""


def html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table without styles or scripts: the notebook brings its own."""

    def row(tag: str, values: Sequence[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{_escaped(value)}</{tag}>' for value in values)}</tr>"

    lines = [f"<table><caption>{_escaped(caption)}</caption>"]
    if rows:
        lines += [f"<thead>{row('th', columns)}</thead><tbody>", *(row("td", values) for values in rows[:MAX_ROWS])]
        if len(rows) > MAX_ROWS:
            lines.append(f'<tr><td colspan="{len(columns)}">and {len(rows) - MAX_ROWS} more</td></tr>')
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>"])


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))

"""Every architecture of the zoo."""

from __future__ import annotations

from . import audio, dense_images, graph_nets, phones, small_text_and_tables, text, time_series, unusual, vision, vision_dense
from .entry import Entry

ENTRIES: list[Entry] = [
    *phones.ENTRIES,
    *dense_images.ENTRIES,
    *small_text_and_tables.ENTRIES,
    *time_series.ENTRIES,
    *graph_nets.ENTRIES,
    *unusual.ENTRIES,
    *text.ENTRIES,
    *vision.ENTRIES,
    *vision_dense.ENTRIES,
    *audio.ENTRIES,
]
"""The quick ones first."""

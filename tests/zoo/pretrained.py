"""Modules of the package `transformers`, from configurations alone: tiny, with random weights and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def config(kind: str, **sizes: Any) -> Any:
    """A configuration without anything random: PyTorch and a graph can't draw the same numbers."""
    import transformers

    found = getattr(transformers, kind)(**sizes)
    _without_randomness(found)
    return found


def _without_randomness(found: Any) -> None:
    for name, value in list(vars(found).items()):
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(found, name, type(value)(0))
        elif hasattr(value, "to_dict"):  # a configuration inside this one
            _without_randomness(value)


def build(model: str, kind: str, **sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(config(kind, **sizes))
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made


class Field(nn.Module):
    """One tensor of what a model returns, by name; the inputs go to the model under the names given here."""

    def __init__(self, model: nn.Module, name: str = "logits", **fixed: Any) -> None:
        super().__init__()
        self.model, self.name, self.fixed = model, name, fixed

    def call(self, **inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self.model(**inputs, **self.fixed), self.name)
        return found


class FromTokens(Field):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.call(input_ids=input_ids)


class FromMaskedTokens(Field):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.call(input_ids=input_ids, attention_mask=attention_mask)


class FromTwoTexts(Field):
    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.call(input_ids=input_ids, decoder_input_ids=decoder_input_ids)


class FromPixels(Field):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.call(pixel_values=pixel_values)


class FromWave(Field):
    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        return self.call(input_values=input_values)


def wrapped(wrapper: Callable[..., nn.Module], model: str, kind: str, output: str = "logits", **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: wrapper(build(model, kind, **sizes), output)


def plain(model: str, kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """The model as `transformers` makes it: it takes labels and returns its loss first."""
    return lambda: build(model, kind, **sizes)

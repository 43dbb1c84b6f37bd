"""The model most tests of this folder run."""

from __future__ import annotations

import pytest

import torch_ort_ckpt as toc
from tests.models import exported


@pytest.fixture
def model() -> toc.OrtModule:
    return toc.OrtModule(exported("mlp"), threads=1)

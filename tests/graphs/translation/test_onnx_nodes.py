"""The `onnx` package's own test vectors, run through the translator: every case either passes or is listed here with its reason."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from torch_ort_ckpt.graphs.translation import supported_ops, translate
from torch_ort_ckpt.graphs.translation.constants import read_tensor

BUILT_IN = {"Constant", "Identity", "If", "Loop", "Scan"}

NOT_RUN = {
    r"test_(bernoulli|training_dropout)(?!_zero_ratio)": "random: the vectors were drawn with numpy's generator",
    r"_string": "string tensors",
    r"test_(add|sub|div|mod|max|min|greater|greater_equal|less|less_equal)_uint(16|32|64)": "torch knows only uint8",
    r"test_bitwise_not_3d": "torch knows only uint8",
    r"U?INT[24](?!\d)|FLOAT4|(?i:e8m0)": "element types narrower than torch's, or without an equal in it",
    r"test_attention.*(bf16|fp16)": "half precision: the reference rounds at other places than torch's kernels",
    r"sequence_map|test_if_opt|test_loop16_seq_none": "sequence and optional graph inputs",
    r"test_attention.*(window|nonpad|padded_kv)(?!.*expanded)": "attributes and inputs of Attention beyond opset 23",
    r"test_scan_sum": "Scan of opset 8, with its batch axis",
}
"""Cases of supported operators that don't run, by a pattern of their names."""


def _cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}


CASES = _cases()
SUPPORTED = {("", name) for name in BUILT_IN} | {(domain, name) for domain, names in supported_ops().items() for name in names}


def missing_op(model: onnx.ModelProto) -> str | None:
    ops = {(node.domain, node.op_type) for node in model.graph.node} - SUPPORTED
    return "::".join(part for part in min(ops) if part) if ops else None


def reason_not_run(name: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, name)), None)


RUN = [name for name, case in CASES.items() if missing_op(case.model) is None and reason_not_run(name) is None]


@pytest.mark.parametrize("name", RUN)
def test_node(name: str) -> None:
    case = CASES[name]
    translation = translate(case.model)
    for inputs, outputs in case.data_sets:
        given = {value.name: as_torch(array) for value, array in zip(case.model.graph.input, inputs, strict=False)}
        found = translation.module.forward(*(given[key] for key in translation.inputs))
        for value, expected in zip(found, outputs, strict=True):
            assert_equal(value, expected, case)


def test_the_count_of_what_passes_does_not_shrink() -> None:
    count = Counter(
        "passed" if name in set(RUN) else "operator" if missing_op(case.model) else reason_not_run(name) for name, case in CASES.items()
    )
    assert count["passed"] >= 1400
    assert count["passed"] / (len(CASES) - count["operator"]) > 0.85


def test_every_reason_still_applies() -> None:
    unused = [
        pattern for pattern in NOT_RUN if not any(re.search(pattern, name) and missing_op(CASES[name].model) is None for name in CASES)
    ]
    assert not unused


def as_torch(value: Any) -> Any:
    if isinstance(value, list):
        return [as_torch(item) for item in value]
    if isinstance(value, onnx.TensorProto):
        return read_tensor(value)
    return read_tensor(numpy_helper.from_array(np.asarray(value)))


def assert_equal(found: Any, expected: Any, case: Any) -> None:
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, case)
        return
    reference = as_torch(expected)
    assert found.dtype == reference.dtype
    assert found.shape == reference.shape
    kind = torch.float64 if reference.is_floating_point() else reference.dtype
    atol = max(case.atol, 1e-6) if "_dft" in case.name else case.atol  # sums of up to 100 numbers, whose imaginary parts should be 0
    torch.testing.assert_close(found.to(kind), reference.to(kind), rtol=case.rtol, atol=atol, equal_nan=True)

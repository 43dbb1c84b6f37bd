"""Every layer and loss of `torch.nn`, and many functions: joint graph -> ONNX -> onnxruntime against native PyTorch, at two batch sizes.

A few run every time; all of them with `pytest -m zoo` (`TOC_ZOO=1`). Any onnxruntime will do, the stock one included.
"""

from __future__ import annotations

import pytest

from .sweep import functions, losses, modules
from .sweep.built import worst_difference
from .sweep.case import Case
from .sweep.onnx_joint import compare

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CASES = [*modules.MODULES, *losses.LOSSES, *functions.CASES]
REFUSED = {
    "BatchNorm3d momentum None": "data-dependent",  # the factor is computed from a counter in Python: the exporter's pipeline handles it
    "FractionalMaxPool2d": "became a number",
    "interpolate antialias": "_upsample_bilinear2d_aa",
    "AdaptiveLogSoftmaxWithLoss": "data-dependent",
    "torch.pinv": "linalg_eigh|linalg_svd|linalg_pinv",
    "torch.matrix_exp": "linalg_matrix_exp",
    "torch.mode": "mode",
}
"""What can't be done, and what the error says. Nothing may be wrong without an error."""
ORDINARY = [case for case in CASES if case.ordinary]


def _named(cases: list[Case]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", _named(ORDINARY))
def test_a_few_cases(case):
    assert compare(case).worst < 1e-4


@pytest.mark.parametrize("case", _named(ORDINARY[:4]))
def test_a_few_cases_through_the_export(case):
    assert worst_difference(case) < 1e-4


def test_fast_forms():
    names = ("MaxPool2d", "Conv2d grouped", "ReLU")
    for case in CASES:
        if case.name in names:
            assert compare(case, optimize=True, batches=(4, 7, 1)).worst < 1e-4


@pytest.mark.zoo
@pytest.mark.parametrize("case", _named([case for case in CASES if not case.ordinary and case.name not in REFUSED]))
def test_every_case(case):
    assert compare(case).worst < 1e-4


@pytest.mark.zoo
@pytest.mark.parametrize("case", _named([case for case in CASES if case.name not in REFUSED]))
def test_every_case_through_the_export(case):
    assert worst_difference(case) < 1e-4


@pytest.mark.zoo
@pytest.mark.parametrize("case", _named([*modules.CONVOLUTIONS, *modules.POOLS]))
def test_every_fast_form(case):
    if case.name in REFUSED:
        pytest.skip("refused")
    assert compare(case, optimize=True, batches=(4, 7, 2)).worst < 1e-4


@pytest.mark.zoo
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_done_is_refused(name):
    (case,) = (case for case in CASES if case.name == name)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # PyTorch's own errors; the pipeline converts them
        compare(case)
    texts, error = [], caught.value
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    assert any(word in "\n".join(texts) for word in REFUSED[name].split("|")), texts[-1][:500]


def test_names_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES)
    assert REFUSED.keys() <= {case.name for case in CASES}

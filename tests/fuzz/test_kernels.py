"""Random graphs of every operator that ORT has a gradient for: engine "ort" and engine "torch" compute what PyTorch computes, or refuse.

Several batch sizes go through each graph in turn, so that state kept from one run would show in the next. `TOC_FUZZ_FILES` sets how many.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .kernels import LAYERS, Case, Worker

pytestmark = pytest.mark.ort

FILES = int(os.environ.get("TOC_FUZZ_FILES", "0"))
CASES = max(FILES // 20, 60)

numbers = st.integers(0, 63)
layer = st.tuples(st.sampled_from(sorted(LAYERS)), st.lists(numbers, max_size=24)).map(list)
cases = st.fixed_dictionaries(
    {
        "numbers": st.lists(numbers, max_size=6),
        "layers": st.lists(layer, min_size=1, max_size=5),
        "batches": st.lists(st.sampled_from([1, 2, 3, 4, 5, 7]), min_size=2, max_size=4),
        "threads": st.sampled_from([1, 2]),
    }
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


found: Counter[str] = Counter()


@settings(
    max_examples=CASES,
    deadline=None,
    derandomize=not FILES,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if FILES else [])],
    suppress_health_check=list(HealthCheck),
)
@given(case=cases)
def test_random_graphs(case: Case, worker: Worker) -> None:
    outcome = worker.check(case)
    found[outcome.partition(":")[0].split(" ")[0]] += 1
    assert not outcome.startswith(("wrong", "broken")), (outcome, case)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_layer_by_itself(name: str, worker: Worker) -> None:
    """With the simplest settings, and some others."""
    outcomes = []
    for seed in range(6 if not FILES else 40):
        numbers = [(seed * 37 + place * place * 11) % 64 if seed else 0 for place in range(24)]
        case = {"numbers": numbers[:6], "layers": [[name, numbers]], "batches": [3, 1, 4], "threads": 1}
        outcomes.append(worker.check(case))
        assert not outcomes[-1].startswith(("wrong", "broken")), (outcomes[-1], case)
    if name not in ("resize", "transposed_convolution"):  # ORT has no kernels for their gradients
        assert "equal" in outcomes


def test_most_graphs_were_compared() -> None:
    print(dict(found))
    if found:
        assert found["equal"] > sum(found.values()) // 2

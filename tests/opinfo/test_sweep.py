"""A third of PyTorch's op database, once per mode in float32, against CPU torch. `make conformance` runs all of it.

What fails, and why it must, stands in known_failures.toml.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import torchax_core  # noqa: F401  # makes the device
from torchax_core.conformance import Options, Report, cells, known_failures, ops_of, sweep

SHARDS = 12  # so that test processes share them; each is every twelfth op
RUN = (1, 4, 7, 10)  # what fits the time that `make test` has
KNOWN = known_failures(Path(__file__).parent / "known_failures.toml")


@pytest.mark.slow
@pytest.mark.parametrize("shard", RUN)
def test_ops_once_per_mode(shard):
    todo = cells(dtypes="float32", shard=f"{shard}/{SHARDS}")
    results = sweep(todo, Options(max_samples=1, quick=True))
    report = Report({}, KNOWN, {result.cell: result for result in results})
    assert len(report.results) == len(todo) > 200
    failures = [f"{x.status} {x.cell}: {x.message}" for x in report.failures()]
    assert not failures, "\n".join(
        ["again: torchax conformance --quick --max-samples 1 --dtypes float32 -v --ops OP --mode MODE", *failures]
    )


@pytest.mark.parametrize("entry", KNOWN, ids=str)
def test_a_known_failure_names_an_op_and_a_reason(entry):
    unknown = [pattern for pattern in entry.ops if not any(fnmatchcase(op, pattern) for op in ops_of(None))]
    assert not unknown, f"torch's op database has no {unknown}; say `torch = ...` if another version has"
    assert len(entry.reason.split()) > 3

"""opinfo.py: which cases there are, and that a case that should fail does."""

import json
import subprocess
import sys

import pytest
import torch

import torchax_core  # noqa: F401  # makes the device
from torchax_core import opinfo
from torchax_core.opinfo import Case, cases, known_failures, run_case


def test_cases_follow_the_options():
    found = cases("^(add|erfinv)$", "float32,int64,float64", "forward,grad,inplace")
    assert Case("add", "float32", "forward") in found and Case("erfinv", "float64", "grad") in found
    assert Case("add", "float32", "grad") not in found, "gradients are for the doubles among the dtypes"
    assert Case("add", "int64", "grad") not in found
    assert {case.op for case in found} == {"add", "erfinv"}
    with pytest.raises(ValueError, match="sideways"):
        cases("add", "float32", "sideways")
    with pytest.raises(ValueError, match="float31"):
        cases("add", "float31", "forward")


def test_known_failures(tmp_path):
    file = tmp_path / "known.toml"
    file.write_text('[[failure]]\nop = "ad*"\ndtype = ["float32"]\nmode = "out"\nreason = "because"\n')
    found = {str(c): c.reason for c in cases("^add$", "float32,float64", "forward,out", known_failures(file))}
    assert found == {
        "add float32 forward": None,
        "add float32 out": "because",
        "add float64 forward": None,
        "add float64 out": None,
    }
    file.write_text('[[failure]]\nop = "add"\n')
    with pytest.raises(ValueError, match="needs `op` and `reason`"):
        known_failures(file)


@pytest.mark.parametrize("mode", opinfo.MODES)
def test_a_right_op_passes(mode):
    op = {"view": "transpose", "errors": "dot"}.get(mode, "add")
    case = Case(op, "-" if mode == "errors" else "float64", mode)
    result = run_case(case, max_samples=3)
    assert (result.status, result.message) == ("passed", "")
    assert result.samples > 0


def test_random_ops_are_compared_by_shape():
    assert run_case(Case("nn.functional.dropout", "float32", "forward"), max_samples=3).status == "passed"


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("forward", "sample 0: result: values differ"),
        ("inplace", "sample 0: the in-place form returned another tensor"),
        ("out", "sample 0: the returned tensor is not the one given"),
        ("grad", "sample 0: gradient: result: values differ"),
    ],
)
def test_a_wrong_op_fails(monkeypatch, mode, says):
    class Wrong:
        """`exp` as it must not be."""

        def __init__(self, op):
            self.op = op

        def __getattr__(self, name):
            return getattr(self.op, name)

        def __call__(self, x, *args, out=None, **kwargs):
            wrong = x.exp() if out is not None else torch.exp(x * (1 + 1e-3))
            return wrong if x.device.type == "jax" else torch.exp(x, out=out)

        @property
        def inplace_variant(self):
            return lambda x: x.exp() if x.device.type == "jax" else x.exp_()

    monkeypatch.setitem(opinfo._ops(), "exp", Wrong(opinfo._ops()["exp"]))
    result = run_case(Case("exp", "float64", mode), max_samples=1)
    assert result.status == "failed" and result.message.startswith(says)
    known = run_case(Case("exp", "float64", mode, reason="it is wrong"), max_samples=1)
    assert known.status == "known"


def test_a_known_failure_that_passes_is_stale():
    assert run_case(Case("exp", "float32", "forward", reason="was wrong once"), max_samples=1).status == "stale"


@pytest.mark.slow
def test_command(tmp_path):
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "torchax_core.testing", "--ops", "^exp$", "--dtypes", "float32"]
    run = subprocess.run([*command, "--json", str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(file.read_text())
    assert {r["case"]["mode"] for r in results if r["status"] == "passed"} >= {"forward", "inplace", "out"}
    bad = subprocess.run([*command, "--shard", "3/2"], cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 2 and "say i/n" in bad.stderr

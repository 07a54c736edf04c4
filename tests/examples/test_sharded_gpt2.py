"""examples/sharded_gpt2.py: every layout gives the losses of one device, and keeps the state in its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import dataclasses, json, sys
import sharded_gpt2
print("\\n" + json.dumps({name: dataclasses.asdict(run) for name, run in sharded_gpt2.main(steps=5, batch=8).items()}))
"""
LAYOUTS = ["data parallel", "fsdp", "tensor parallel", "fsdp and tensor parallel"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2] / "examples")}
    # the example compiles each step twice, to run it and to look at it
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_device(runs, layout):
    alone = runs["one device"]["losses"]
    assert runs[layout]["losses"] == pytest.approx(alone, rel=1e-4)
    assert len(alone) == 5 and alone[-1] < alone[0] - 0.5  # steps that did nothing would not pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_gradients_and_moments_stay_where_they_were_put(runs, layout):
    assert runs[layout]["moved"] == []


def test_what_a_device_holds(runs):
    """An eighth where all is split over eight; with tensor parallelism the position table and the norms are left whole."""
    held = {name: run["held"] for name, run in runs.items()}
    assert held["one device"] == held["data parallel"] == 1
    assert held["fsdp"] == 1 / 8
    assert 1 / 8 < held["tensor parallel"] < 0.16 and 1 / 8 < held["fsdp and tensor parallel"] < 0.16


def test_what_is_sent_between_devices(runs):
    """Data parallel: gradients are added up, nothing else. Tensor parallel: results are, in every block forth and back, and no
    weight is gathered. FSDP: each of its 28 weights is gathered."""
    sent = {name: run["collectives"] for name, run in runs.items()}
    assert sum(sent["one device"].values()) == 0
    assert sent["data parallel"]["all-reduce"] == sum(sent["data parallel"].values()) > 0
    assert sent["tensor parallel"]["all-reduce"] >= 2 * 2 * 2 and sent["tensor parallel"]["all-gather"] == 0
    assert sent["fsdp"]["all-gather"] >= 28
    both = sent["fsdp and tensor parallel"]
    assert both["all-gather"] >= 28 and both["all-reduce"] > sent["tensor parallel"]["all-reduce"]

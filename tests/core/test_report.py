"""reporting.py and log.py: what a process runs with and has compiled, as it happened."""

import json
import os
import re
import subprocess
import sys

import torch

import torchax_core

PROGRAM = """
import torch, torchax_core
x = torch.ones(2, 3, device="jax")
double = torchax_core.jit(lambda x: x * 2, name="double")
double(x), double(x), double(x[:1].clone())
held = x + x
held + held
print(torchax_core.report().json())
"""


def run(**variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHAX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean | variables | {"TORCHAX_PACKS": "aten"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def test_report_counts_what_a_program_did(tmp_path):
    first, log = run(TORCHAX_CACHE=str(tmp_path), TORCHAX_LOG="ops:sync")
    assert first["versions"]["torch"] == torch.__version__ and "torchax-ops-aten" in first["versions"]
    (pack,) = first["packs"]
    assert pack["name"] == "aten" and pack["state"] == "in use" and pack["api"] == 1 and pack["definitions"] > 100
    assert pack["distribution"].startswith("torchax-ops-aten ") and pack["error"] is None
    (function,) = first["jit"]
    assert (function["name"], function["calls"], function["hits"], function["traced"]) == ("double", 3, 1, 2)
    assert function["seconds"] > 0 and first["compiled"]["seconds"] > 0
    assert first["kernels"]["new"] == first["kernels"]["signatures"] >= 4
    assert sum(device["live_bytes"] for device in first["devices"]) >= 2 * 24
    assert first["cache"]["hits"] == 0 and first["cache"]["misses"] == first["compiled"]["programs"] >= 5
    assert first["cache"]["files"] > 0 and first["cache"]["bytes"] > 0

    again, _ = run(TORCHAX_CACHE=str(tmp_path))
    assert again["cache"]["misses"] == 0 and again["cache"]["hits"] == again["compiled"]["programs"] > 0

    lines = [line for line in log.splitlines() if "aten.add.Tensor(float32[2,3], float32[2,3]) -> float32[2,3]" in line]
    assert len(lines) == 2
    assert re.search(r"  [\d.]+ us, done after [\d.]+ us, compiled 1 program in [\d.]+ ms$", lines[0])
    assert re.search(r"  [\d.]+ us, done after [\d.]+ us, hit$", lines[1])
    assert len(re.findall(r"jit\(double\)\(float32\[2,3\]\) -> float32\[2,3\]", log)) == 2


def test_report_reads_well():
    torch.ones(2, device="jax") + 1
    text = repr(torchax_core.report())
    assert re.search(r"^versions  python .*torch .*torchax-core ", text)
    assert re.search(r"^device .*in live arrays$", text, re.M) and re.search(
        r"^pack      aten \(torchax-ops-aten", text, re.M
    )
    assert re.search(r"^compiled  \d+ programs in [\d.]+ s$", text, re.M) and "persistent cache" in text

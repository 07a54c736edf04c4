"""Layouts over several devices and torchax_core.distributed: eight_devices.py, run where jax has eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

EIGHT = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def test_on_eight_devices() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("eight_devices.py")),
    ]
    done = subprocess.run(command, env=EIGHT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]

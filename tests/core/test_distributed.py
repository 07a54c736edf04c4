"""Layouts over several devices and torchax_core.distributed: eight_devices.py, run where jax has eight virtual CPU devices."""

import os
import socket
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


def test_on_two_processes(tmp_path: Path) -> None:
    """Under jax.distributed, with four devices each."""
    examples = str(Path(__file__).parents[2] / "examples")
    environment = EIGHT | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",  # compiles faster
        "PYTHONPATH": os.pathsep.join([examples, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running, logs = [], [tmp_path / f"{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        command = [
            sys.executable,
            str(Path(__file__).with_name("two_processes.py")),
            str(rank),
            str(port),
            str(tmp_path),
        ]
        with log.open("w") as file:
            running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    try:
        codes = [process.wait(timeout=900) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()  # one program, one loss

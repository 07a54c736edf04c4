"""One checkpoint made by two processes on loopback; one of them killed in the midst of the next."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

from torchax_core.checkpoint import latest_step, load_checkpoint

PROCESS = textwrap.dedent(
    """
    import os, signal, sys
    import jax

    index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, initialization_timeout=200)
    import orbax.checkpoint as ocp
    import torch, torchax_core
    from torchax_core.checkpoint import load_checkpoint, save_checkpoint
    from torchax_core.errors import CheckpointError

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))

    def made(value):
        model = torch.nn.Linear(4, 8)
        with torch.no_grad():
            model.weight.fill_(value), model.bias.fill_(value)
        model.to("jax").weight.shard_(rows)
        own = torch.full((3,), float(value + index), dtype=torch.float64, device="jax")
        bits = torch.full((2,), value, dtype=torch.bfloat16, device="jax")
        return {"model": model, "own": own, "cpu": torch.arange(3) + value, "bits": bits, "n": value}

    def save(value, **options):
        state = made(value)
        torch.manual_seed(10 * value + index)
        return save_checkpoint(state, folder, value, **options)

    save(1)
    save(2, wait=False).wait()
    into = made(7)
    load_checkpoint(folder, into=into)
    drawn = torch.rand(3)
    torch.manual_seed(20 + index)
    assert torch.equal(drawn, torch.rand(3))  # each its own random state
    weight = into["model"].weight.jax()
    assert weight.sharding == rows and [float(s.data[0, 0]) for s in weight.addressable_shards] == [2, 2]
    assert into["model"].bias.tolist() == [2] * 8 and into["own"].tolist() == [2] * 3  # the first's
    assert into["cpu"].tolist() == [2, 3, 4] and into["bits"].tolist() == [2, 2]
    assert load_checkpoint(folder, 1)["model"]["weight"].is_fully_addressable

    makes_folders, os.mkdir = os.mkdir, lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full"))
    try:
        save(3)
        raise AssertionError("nothing was raised")
    except (OSError if index == 0 else CheckpointError) as error:
        assert "disk full" in str(error)
    os.mkdir = makes_folders

    write = ocp.Checkpointer.save
    ocp.Checkpointer.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL) if index else write(*args, **kwargs)
    print("ready", flush=True)
    save(3)
    """
)


def test_two_processes_save_and_load(tmp_path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    errors = [open(tmp_path / f"errors{i}", "w+") for i in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(i), str(port), str(tmp_path / "run")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors[i],
            text=True,
        )
        for i in range(2)
    ]
    try:
        killed = processes[1].wait(timeout=500)
        said = processes[1].stdout.read()
        time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for file in errors:
        file.seek(0)
    assert killed == -signal.SIGKILL and "ready" in said, "\n".join(file.read()[-3000:] for file in errors)
    assert any(folder.name == ".00000003.0.saving" for folder in (tmp_path / "run").iterdir())
    state = load_checkpoint(tmp_path / "run")  # by one process, what two have written
    assert latest_step(tmp_path / "run") == 2 and state["n"] == 2 and (state["model"]["weight"] == 2).all()

"""Checkpoints and safetensors: resumed bit for bit, readable after a kill at any moment, and nothing changed by a bad file."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torchax_core
from torchax_core import checkpoint, interop
from torchax_core.checkpoint import latest_step, load_checkpoint, save_checkpoint
from torchax_core.errors import CheckpointError
from torchax_core.weights import load_safetensors, save_safetensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.uint8, torch.bool, torch.complex64]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Run:
    """A training run: a model with dropout and statistics, an optimizer, a schedule."""

    def __init__(self, seed: int, device: str = "jax", jitted: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.device = device
        self.step = torchax_core.jit(self._step) if jitted else self._step

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step(torch.randn(5, 3).to(self.device))
            self.schedule.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def values(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        for values in self.optimizer.state_dict()["state"].values():
            tensors += list(values.values())
        random = [torch.rand(3), torch.rand(3, device="jax")]
        return [bits(t) for t in [*tensors, *random]] + [repr(self.schedule.get_last_lr()).encode()]


@pytest.mark.parametrize("jitted", [True, False])
def test_a_run_resumes_bit_for_bit(tmp_path, jitted) -> None:
    run = Run(0, jitted=jitted)
    run.go(3)
    save_checkpoint(run.state, tmp_path, 3)
    run.go(2)
    wanted = run.values()
    load_checkpoint(tmp_path, into=run.state)  # the same objects, back in time
    run.go(2)
    assert run.values() == wanted
    fresh = Run(1, jitted=jitted)  # another process, so to speak: other weights, other seed, no optimizer state
    fresh.go(1 if jitted else 0)
    load_checkpoint(tmp_path, into=fresh.state)
    fresh.go(2)
    assert fresh.values() == wanted


def test_a_run_on_the_cpu_resumes_too(tmp_path) -> None:
    run = Run(0, "cpu", jitted=False)
    run.go(3)
    save_checkpoint(run.state, tmp_path, 3)
    run.go(2)
    wanted = run.values()
    load_checkpoint(tmp_path, into=run.state)
    run.go(2)
    assert run.values() == wanted


def test_what_can_be_saved(tmp_path) -> None:
    tensors = {str(d): torch.linspace(-2, 2, 6).reshape(2, 3).to(d) for d in DTYPES}
    state = {
        "jax": {k: v.to("jax") for k, v in tensors.items()},
        "cpu": tensors,
        "numpy": np.arange(3, dtype=np.int64),
        "big": torch.tensor(2**40, device="jax"),
        "numbers": (1, 2.5, float("inf"), 1 + 2j, True, None, "s", b"\x00\xff", torch.int8),
        5: [torch.empty(0, 3, device="jax")],
        "optax": optax.adam(1e-3).init({"w": jnp.ones(2)}),
        "key": jax.random.key(3),
    }
    save_checkpoint(state, tmp_path, 0)
    same = load_checkpoint(tmp_path, into=state)
    for name, value in tensors.items():
        assert bits(same["jax"][name]) == bits(same["cpu"][name]) == bits(value)
        assert same["jax"][name].device.type == "jax" and same["cpu"][name].device.type == "cpu"
    assert same["big"].item() == 2**40 and same[5][0].shape == (0, 3)
    assert same["numbers"] == state["numbers"] and type(same["optax"][0]) is type(state["optax"][0])
    assert (jax.random.key_data(same["key"]) == jax.random.key_data(state["key"])).all()
    plain = load_checkpoint(tmp_path)
    assert isinstance(plain["jax"]["torch.bfloat16"], jax.Array) and isinstance(plain["cpu"]["torch.int64"], jax.Array)
    assert plain["big"].dtype == jnp.int64 and plain["optax"][0]["count"].item() == 0 and list(plain)[5] == 5
    with pytest.raises(CheckpointError, match=r"state\['x'\]\[1\] is a set"):
        save_checkpoint({"x": [1, {2}]}, tmp_path, 1)
    assert latest_step(tmp_path) == 0


def test_steps_are_replaced_and_kept(tmp_path) -> None:
    value = torch.zeros(2, device="jax")
    for step in (1, 2, 10):
        save_checkpoint({"v": value + step}, tmp_path, step)
    assert latest_step(tmp_path) == 10
    save_checkpoint({"v": value - 1}, tmp_path, 2)
    assert load_checkpoint(tmp_path, 2)["v"].tolist() == [-1, -1] and load_checkpoint(tmp_path)["v"].tolist() == [
        10,
        10,
    ]
    save_checkpoint({"v": value}, tmp_path, 11, keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["00000010.0", "00000011.0"]
    assert load_checkpoint(tmp_path / "00000010.0")["v"].tolist() == [10, 10]
    with pytest.raises(CheckpointError, match="no step 2 in .*there are 10, 11"):
        load_checkpoint(tmp_path, 2)
    with pytest.raises(CheckpointError, match="is a file"):
        save_checkpoint({}, tmp_path / "00000010.0" / "torchax.json", 1)


def test_saving_in_the_background(tmp_path) -> None:
    state = torch.zeros(100_000, device="jax")
    step = interop.jax_jit(lambda s: s + 1, {"donate_argnums": (0,)})
    saves = []
    for number in range(3):
        saves.append(save_checkpoint({"s": state}, tmp_path, number, wait=False))
        state = step(state)  # gives up the memory of what is being saved
    for number, save in enumerate(saves):
        assert save.wait() == tmp_path / f"{number:08d}.0" and save.done()
        assert load_checkpoint(tmp_path, number)["s"][0].item() == number
    failing = save_checkpoint({"s": state}, tmp_path, 3, wait=False)
    failing.wait()
    checkpoint_write = checkpoint._write
    try:
        checkpoint._write = lambda *args: (_ for _ in ()).throw(OSError("disk full"))
        save = save_checkpoint({"s": state}, tmp_path, 4, wait=False)
        with pytest.raises(OSError, match="disk full"):
            save.wait()
    finally:
        checkpoint._write = checkpoint_write
    assert latest_step(tmp_path) == 3


KILLED = """
import json, os, signal, sys, time, torch, torchax_core
from torchax_core import checkpoint
import orbax.checkpoint as ocp

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def then_kill(function):
    return lambda *args, **kwargs: (function(*args, **kwargs), kill())

def save(folder, number):
    checkpoint.save_checkpoint({"w": torch.full((50_000,), float(number), device="jax"), "n": number}, folder, 1)

def child(point, folder, ready):
    save(folder, 1)
    if point == "arrays":
        ocp.Checkpointer.save = then_kill(ocp.Checkpointer.save)
    elif point == "manifest":
        checkpoint.zlib.crc32 = kill
    elif point == "rename":
        checkpoint.os.rename = kill
    elif point == "tidy":
        checkpoint.shutil.rmtree = kill
    os.write(ready, b"1")
    number = 2
    while True:
        save(folder, number)
        number += 1

codes = {}
for point in sys.argv[2:]:  # forked before jax has started: one import for all
    listen, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(point, os.path.join(sys.argv[1], point), ready)
        finally:
            os._exit(1)
    os.close(ready)
    os.read(listen, 1)
    if point.startswith("after"):
        time.sleep(float(point.split()[1]))
        os.kill(pid, signal.SIGKILL)
    codes[point] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path) -> None:
    points = ["arrays", "manifest", "rename", "tidy", "after 0.013", "after 0.231"]
    command = [sys.executable, "-c", KILLED, str(tmp_path), *points]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == dict.fromkeys(points, -signal.SIGKILL), done.stderr[-3000:]
    for point in points:
        left = load_checkpoint(tmp_path / point)
        assert left["n"] >= 1 and (np.array(left["w"]) == left["n"]).all()
        if point in ("arrays", "manifest", "rename"):
            assert left["n"] == 1 and any(f.name.endswith(".saving") for f in (tmp_path / point).iterdir())
        if point == "tidy":
            assert left["n"] == 2
        save_checkpoint({"n": -1}, tmp_path / point, 1)
        assert load_checkpoint(tmp_path / point) == {"n": -1}
        assert [f.name.startswith("00000001.") for f in (tmp_path / point).iterdir()] == [True]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


@pytest.mark.parametrize("damage", ["cut off", "altered", "missing"])
def test_damaged_files_change_nothing(tmp_path, damage) -> None:
    run = Run(0, jitted=False)
    run.go(2)
    save_checkpoint(run.state, tmp_path / "whole", 2)
    run.go(1)
    before = run.values()
    torch.jax.set_rng_state(state := torch.jax.get_rng_state())
    count = len(_files(tmp_path / "whole"))
    assert count >= 3
    for i in range(count):
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", damaged)
        file = _files(damaged)[i]
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            middle = len(data) // 2
            file.write_bytes(
                data[:middle] + (b"" if damage == "cut off" else bytes([data[middle] ^ 1]) + data[middle + 1 :])
            )
        with pytest.raises(CheckpointError, match="earlier step may be whole|no checkpoint in"):
            load_checkpoint(damaged / "00000002.0" if damage == "missing" else damaged, into=run.state)
        assert torch.equal(torch.jax.get_rng_state(), state)
    assert run.values()[:-3] == before[:-3]  # but for the random numbers that `values` draws
    load_checkpoint(tmp_path / "whole", into=run.state)


def test_foreign_files_and_states_that_do_not_fit(tmp_path) -> None:
    run = Run(0, jitted=False)
    run.go(1)
    save_checkpoint(run.state, tmp_path / "c", 1)
    before = bits(run.model[0].weight)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "torchax.json").write_text('{"format": "else"}\n')
    (tmp_path / "noise.pt").write_bytes(b"noise" * 100)
    cases = {
        "nowhere": "does not exist",
        "empty": "no checkpoint in",
        "foreign": "was not written by save_checkpoint",
        "noise.pt": "no file that torch.load can read",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path / name, into=run.state)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 5)).to("jax")
    untouched = bits(other[0].weight)
    for into, message in [
        ({"model": other}, r"state\['model'\].3.weight was saved as torch.float32 of shape \(2, 4\), but .* \(5, 4\)"),
        ({"model": nn.Linear(3, 4).to("jax")}, "Missing: bias, weight; not in it: 0.bias"),
        ({"nope": other}, "has no 'nope'; saved are 'model', 'optimizer', 'schedule'"),
        ({"optimizer": torch.optim.SGD(other[0].parameters(), 1e-3)}, r"with \[6\] parameters.*SGD has \[2\]"),
        ({"model": [1]}, "was saved as a dict, but `into` has 1 items there"),
        ({"model": run.model, "optimizer": torch.ones(2)}, r"state\['optimizer'\] was saved as dict"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path / "c", into=into)
    assert bits(other[0].weight) == untouched and bits(run.model[0].weight) == before


def test_a_failure_half_way_is_undone(tmp_path) -> None:
    class Fussy:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            if state != {"a": 1} or self.fail:
                self.fail = False
                raise ValueError("fussy")

        fail = False

    run, fussy = Run(0, jitted=False), Fussy()
    run.go(2)
    save_checkpoint({**run.state, "z": fussy}, tmp_path, 1)
    run.go(1)
    before = [bits(v) for v in run.model.state_dict().values()]
    moments = [bits(v["exp_avg"]) for v in run.optimizer.state_dict()["state"].values()]
    fussy.fail = True
    with pytest.raises(CheckpointError, match="all is as it was: fussy"):
        load_checkpoint(tmp_path, into={**run.state, "z": fussy})
    assert [bits(v) for v in run.model.state_dict().values()] == before
    assert [bits(v["exp_avg"]) for v in run.optimizer.state_dict()["state"].values()] == moments


def test_files_of_torch_save(tmp_path) -> None:
    model = nn.Linear(2, 3)
    torch.save({"m": model.state_dict(), "n": 3}, tmp_path / "t.pt")
    state = load_checkpoint(tmp_path / "t.pt")
    assert isinstance(state["m"]["weight"], jax.Array) and state["n"] == 3
    ours = nn.Linear(2, 3).to("jax")
    load_checkpoint(tmp_path / "t.pt", into={"m": ours})
    assert bits(ours.weight) == bits(model.weight)


# -- safetensors -----------------------------------------------------------------------------------


def test_safetensors_both_ways(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    dtypes = [d for d in DTYPES if d is not torch.complex64]
    tensors = {str(d): torch.linspace(-2, 2, 8).reshape(4, 2).to(d) for d in dtypes} | {"scalar": torch.tensor(2**40)}
    save_safetensors({k: v.to("jax") for k, v in tensors.items()}, tmp_path / "ours", {"made": "here"})
    theirs = load_file(tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    mesh = jax.make_mesh((1,), ("x",))
    over = jax.sharding.NamedSharding(mesh, jax.P("x"))
    for ours in (
        load_safetensors(tmp_path / "theirs"),
        load_safetensors(tmp_path / "theirs", shardings=lambda name, shape: over if shape else None),
    ):
        for name, value in tensors.items():
            assert ours[name].device.type == "jax" and ours[name].dtype is value.dtype is theirs[name].dtype
            assert bits(ours[name]) == bits(theirs[name]) == bits(value)
    assert ours["torch.bfloat16"].jax().sharding.spec == jax.P("x")


def test_safetensors_into_a_module(tmp_path) -> None:
    model, other = nn.Linear(2, 3).to("jax"), nn.Linear(2, 3).to("jax")
    save_safetensors(model, tmp_path / "w")
    assert load_safetensors(tmp_path / "w", into=other) is other and bits(other.weight) == bits(model.weight)
    data = (tmp_path / "w").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-5])
    (tmp_path / "noise").write_bytes(b"noise" * 50)
    for name in ("cut", "noise", "absent"):
        with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
            load_safetensors(tmp_path / name, into=other)
    wider = nn.Linear(2, 4).to("jax")
    before = bits(wider.weight)
    with pytest.raises(CheckpointError, match=r"state.weight was saved as torch.float32 of shape \(3, 2\)"):
        load_safetensors(tmp_path / "w", into=wider)
    assert bits(wider.weight) == before


SHARDED = textwrap.dedent(
    """
    import sys, jax, torch, torchax_core
    from torchax_core.checkpoint import load_checkpoint, save_checkpoint
    from torchax_core.weights import load_safetensors, save_safetensors

    folder = sys.argv[1]
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    rows, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P()))
    model = torch.nn.Linear(4, 8).to("jax")
    model.weight.shard_(rows), model.bias.shard_(whole)
    wanted = model.weight.torch()
    save_checkpoint({"m": model}, folder, 1)
    save_safetensors(model, folder + "/w.safetensors")
    for load in (
        lambda m: load_checkpoint(folder, into={"m": m}),
        lambda m: load_safetensors(folder + "/w.safetensors", into=m),
    ):
        other = torch.nn.Linear(4, 8).to("jax")
        other.weight.shard_(rows), other.bias.shard_(whole)
        load(other)
        assert torch.equal(other.weight.torch(), wanted)
        assert other.weight.jax().sharding == rows and len(other.weight.jax().addressable_shards) == 4
        assert other.weight.jax().addressable_shards[0].data.shape == (2, 4)
    assert len(load_checkpoint(folder)["m"]["weight"].sharding.device_set) == 1
    print("done")
    """
)


def test_sharded_state_on_four_devices(tmp_path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.stdout == "done\n", done.stderr[-3000:]

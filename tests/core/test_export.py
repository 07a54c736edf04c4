"""torch.export programs as JAX functions, StableHLO and files, against the modules they were exported from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export
from typer.testing import CliRunner

import torchax_core
from torchax_core.cli import app
from torchax_core.errors import ConversionError
from torchax_core.export import (
    exported_program_to_jax,
    exported_program_to_stablehlo,
    input_avals,
    load,
    save,
)


def array(tensor: torch.Tensor) -> jax.Array:
    return torchax_core.convert.array_from_torch(tensor)


def close(ours: jax.Array, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torchax_core.convert.torch_from_array(ours), wanted.detach())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ).eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        n, t = ids.shape
        x = self.embedding(ids) + torch.arange(t, device=ids.device)[:, None] / 10
        q, k, v = self.qkv(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).reshape(n, t, 8)).log_softmax(-1)


MODELS = {
    "perceptron": (perceptron, lambda n: torch.randn(n, 4)),
    "convolutional": (convolutional, lambda n: torch.randn(n, 3, 8, 8)),
    "attention": (lambda: Attention().eval(), lambda n: torch.randint(0, 10, (n, 5))),
}


@pytest.mark.parametrize("name", MODELS)
def test_static_program(name: str) -> None:
    make, sample = MODELS[name]
    model, x = make(), sample(3)
    weights, forward = exported_program_to_jax(export(model, (x,)))
    assert weights.keys() >= dict(model.named_parameters()).keys()
    close(jax.jit(forward)(weights, (array(x),)), model(x))
    close(forward(weights, (array(x),)), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_batch(name: str) -> None:
    make, sample = MODELS[name]
    model = make()
    program = export(model, (sample(3),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
    weights, exported = exported_program_to_stablehlo(program)
    assert "tensor<?x" in exported.mlir_module()
    for n in (2, 5):
        x = sample(n)
        close(exported.call(weights, (array(x),), {}), model(x))


def test_dynamic_sequence() -> None:
    model = Attention().eval()
    ids = torch.randint(0, 10, (2, 6))
    program = export(model, (ids,), dynamic_shapes=({0: Dim("batch"), 1: Dim("time")},))
    weights, exported = exported_program_to_stablehlo(program)
    for shape in ((2, 6), (3, 4)):
        ids = torch.randint(0, 10, shape)
        close(exported.call(weights, (array(ids),), {}), model(ids))


def test_range_constraints_hold() -> None:
    program = export(perceptron(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch", min=2, max=8)},))
    (x,), _ = input_avals(program)
    (dimension, four) = x.shape
    assert four == 4
    assert jax.export.is_symbolic_dim(dimension)
    weights, exported = exported_program_to_stablehlo(program)
    exported.call(weights, (jnp.zeros((8, 4)),), {})
    with pytest.raises(ValueError, match="<= 8|8 - "):
        exported.call(weights, (jnp.zeros((9, 4)),), {})


def test_buffers_and_inputs_that_are_written_are_returned() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, state):
            self.count += 1
            state.mul_(2)
            return self.norm(x) + self.count

    model = Counting()
    x, state = torch.randn(4, 3), torch.ones(2)
    weights, forward = exported_program_to_jax(export(model, (x, state)))
    inputs = (array(x), array(state))
    result, written = jax.jit(forward)(weights, inputs)
    close(result, model(x, state))
    buffers = dict(model.named_buffers())
    assert written.keys() == buffers.keys() | {"state"}
    for name, value in written.items():
        close(value, state if name == "state" else buffers[name])
    result, _ = forward(weights | {n: v for n, v in written.items() if n in weights}, inputs)
    close(result, model(x, state))


def test_structured_arguments_and_results() -> None:
    class Structured(nn.Module):
        def forward(self, pair, *, scale):
            return {"sum": (pair[0] + pair[1]) * scale, "parts": [pair[0], (pair[1], 3)]}

    a, b = torch.randn(2), torch.randn(2)
    weights, forward = exported_program_to_jax(export(Structured(), ((a, b),), {"scale": torch.tensor(2.0)}))
    result = forward(weights, ((array(a), array(b)),), {"scale": array(torch.tensor(2.0))})
    close(result["sum"], (a + b) * 2)
    close(result["parts"][1][0], b)
    assert result["parts"][1][1] == 3
    with pytest.raises(TypeError, match="exported with arguments"):
        forward(weights, (array(a),))


def test_gradients_flow_through_the_function() -> None:
    model = perceptron()
    x = torch.randn(3, 4)
    weights, forward = exported_program_to_jax(export(model, (x,)))
    gradients = jax.grad(lambda w: forward(w, (array(x),)).sum())(weights)
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            torchax_core.convert.torch_from_array(gradients[name]), parameter.grad, rtol=1e-4, atol=1e-5
        )


def test_random_programs_ask_for_a_key() -> None:
    model = nn.Dropout(0.5).train()
    weights, forward = exported_program_to_jax(export(model, (torch.ones(100),)))
    one, same, other = (forward(weights, (jnp.ones(100),), key=jax.random.key(seed)) for seed in (1, 1, 2))
    assert set(np.unique(one)) == {0.0, 2.0}
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    with pytest.raises(TypeError, match="key=jax.random.key"):
        forward(weights, (jnp.ones(100),))


def test_composites_are_named_in_the_stablehlo() -> None:
    model = Attention().eval()
    program = export(model, (torch.randint(0, 10, (2, 5)),))
    _, exported = exported_program_to_stablehlo(program)
    text = exported.mlir_module()
    assert 'stablehlo.composite "aten.scaled_dot_product_attention"' in text
    assert "is_causal = true" in text
    assert 'stablehlo.composite "aten.linear"' in text
    _, plain = exported_program_to_stablehlo(program, composites=False)
    assert "stablehlo.composite" not in plain.mlir_module()


def test_composites_of_dynamic_shapes_are_kept_for_other_compilers(tmp_path) -> None:
    model = Attention().eval()
    program = export(model, (torch.randint(0, 10, (3, 5)),), dynamic_shapes=({0: Dim("batch", max=64)},))
    weights, exported = exported_program_to_stablehlo(program)
    text = exported.composites.mlir_module()
    assert 'stablehlo.composite "aten.scaled_dot_product_attention"' in text
    assert text.count('stablehlo.composite "aten.linear"') == 2
    # a composite has its op's operands, and no size besides
    assert re.search(r'composite "aten.linear" %\S+, %\S+, %\S+ \{.*\(tensor<\?x5x8xf32>, tensor<24x8xf32>', text)
    x = torch.randint(0, 10, (7, 5))
    close(exported.call(weights, (array(x),), {}), model(x))
    save(tmp_path / "m.zip", program)
    weights, loaded = load(tmp_path / "m.zip")
    close(loaded.call(weights, (array(x),), {}), model(x))


def test_composites_for_several_platforms() -> None:
    model = nn.Sequential(nn.LogSoftmax(-1)).eval()
    x = torch.randn(2, 3)
    weights, exported = exported_program_to_stablehlo(export(model, (x,)), platforms=["cpu", "tpu"])
    assert 'stablehlo.composite "aten.log_softmax"' in exported.mlir_module()
    close(exported.call(weights, (array(x),), {}), model(x))
    # what depends on the platform is called as a function, which is told the platform
    linear = nn.Linear(3, 2).eval()
    weights, exported = exported_program_to_stablehlo(export(linear, (x,)), platforms=["cpu", "tpu"])
    close(exported.call(weights, (array(x),), {}), linear(x))


def test_composites_have_derivatives_and_batches() -> None:
    model = Attention().eval()
    ids = torch.randint(0, 10, (2, 5))
    weights, forward = exported_program_to_jax(export(model, (ids,)), composites=True)
    gradients = jax.grad(lambda w: forward(w, (array(ids),)).sum())(weights)
    model(ids).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            torchax_core.convert.torch_from_array(gradients[name]), parameter.grad, rtol=1e-4, atol=1e-5
        )
    batched = jax.vmap(lambda x: forward(weights, (x,)))(jnp.stack([array(ids), array(ids)]))
    close(batched[1], model(ids))


def test_overrides_are_exported(env) -> None:
    x = torch.randn(3)

    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    with env.override_op_definition("aten::exp", lambda self: self * 10, is_jax_function=True):
        weights, forward = exported_program_to_jax(export(Exp(), (x,)))
        close(forward(weights, (array(x),)), x * 10)


def test_bfloat16_and_ints_survive_the_file(tmp_path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
            self.register_buffer("shift", torch.tensor([2**40, 1, 2, 3]))

        def forward(self, x):
            return x * self.weight, self.shift + 1

    model = Mixed()
    x = torch.randn(4, dtype=torch.bfloat16)
    save(tmp_path / "m.zip", export(model, (x,)))
    weights, exported = load(tmp_path / "m.zip")
    for ours, wanted in zip(exported.call(weights, (array(x),), {}), model(x), strict=True):
        close(ours, wanted)


def test_damaged_file_is_named(tmp_path) -> None:
    path = tmp_path / "m.zip"
    save(path, export(perceptron(), (torch.randn(1, 4),)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"m\.zip is no whole file"):
        load(path)


READER = textwrap.dedent(
    """
    import io, json, sys, zipfile
    import jax, numpy as np

    jax.config.update("jax_enable_x64", True)  # the program has int64 arguments
    with zipfile.ZipFile(sys.argv[1]) as file:
        program = jax.export.deserialize(bytearray(file.read("program")))
        weights = {
            name: np.frombuffer(file.read(w["file"]), jax.numpy.dtype(w["dtype"])).reshape(w["shape"])
            for name, w in json.loads(file.read("weights.json")).items()
        }
    x = np.load(sys.argv[2])
    np.save(sys.argv[3], program.call(weights, (x,), {}))
    assert "torch" not in sys.modules and "torchax_core" not in sys.modules
    """
)


@pytest.mark.parametrize("name", ["convolutional", "attention"])
def test_a_process_without_torch_runs_the_file(tmp_path, name: str) -> None:
    make, sample = MODELS[name]
    model = make()
    program = export(model, (sample(3),), dynamic_shapes=({0: Dim("batch")},))
    save(tmp_path / "m.zip", program)
    x = sample(7)
    np.save(tmp_path / "x.npy", x.numpy())
    script = tmp_path / "reader.py"
    script.write_text(READER)
    paths = [str(tmp_path / n) for n in ("m.zip", "x.npy", "y.npy")]
    ran = subprocess.run([sys.executable, str(script), *paths], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    torch.testing.assert_close(torch.from_numpy(np.load(paths[2])), model(x).detach())


class BySign(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos() * 2,), (x,))[0]


def test_cond_is_decided_when_it_runs() -> None:
    weights, forward = exported_program_to_jax(export(BySign(), (torch.rand(3),)))
    run = jax.jit(forward)
    for x in (torch.rand(3), -torch.rand(3)):
        close(run(weights, (array(x),)), BySign()(x))


# -- the command ---------------------------------------------------------------------------------

FACTORIES = textwrap.dedent(
    """
    import torch

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)), (torch.ones(2, 4),)

    def wrong():
        return 3
    """
)


def command(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "factories.py").write_text(FACTORIES)
    return subprocess.run(
        [sys.executable, "-m", "torchax_core.cli", "export", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )


def test_command_writes_what_load_reads(tmp_path) -> None:
    ran = command(tmp_path, "factories:make", "--out", "m.zip", "--dynamic-batch", "--text", "--json")
    assert ran.returncode == 0, ran.stderr
    written = json.loads(ran.stdout)
    assert written["file"] == "m.zip"
    assert written["bytes"] == (tmp_path / "m.zip").stat().st_size
    assert re.fullmatch(r"float32\[\w+,4\]", written["inputs"][0])
    assert 'stablehlo.composite "aten.linear"' in written["stablehlo"]
    weights, exported = load(tmp_path / "m.zip")
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    close(exported.call(weights, (array(x),), {}), layer(x))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("factories:mak", "Did you mean 'make'"),
        ("factories:wrong", "expected (model, args)"),
        ("nowhere:make", "no module 'nowhere'"),
        ("factories", "MODULE:FACTORY"),
    ],
)
def test_command_says_what_is_wrong(tmp_path, monkeypatch, name: str, says: str) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    ran = CliRunner().invoke(app, ["export", name, "--out", "m.zip"], env={"COLUMNS": "200"})
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    assert ran.exit_code == 2
    assert says in ran.output
    assert not (tmp_path / "m.zip").exists()

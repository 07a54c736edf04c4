"""torchax_core.compat: code written for google/torchax runs, by its names, on ours."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import torchax_core
from torchax_core import compat

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    yield
    compat.uninstall()
    assert "torchax" not in sys.modules


def test_every_module_imports_by_its_name() -> None:
    import importlib

    for name, target in compat.MODULES.items():
        module = importlib.import_module(name)
        for public in importlib.import_module(target).__all__:
            assert getattr(module, public) is getattr(importlib.import_module(target), public)
        assert importlib.util.find_spec(name) is not None
    import torchax
    from torchax import interop
    from torchax.interop import call_jax, torch_view

    assert interop.call_jax is call_jax and interop._torch_view is torchax_core.interop.torch_view_elem
    from torchax import device_module, export
    from torchax.tensor import Tensor

    assert device_module.device_count() == 1 and export.extract_avals is torchax_core.export.input_avals
    assert Tensor.jax(torch.ones(2, device="jax")).tolist() == [1, 1] and not hasattr(Tensor, "nonsense")
    assert torch_view is torchax.interop.torch_view and torchax.default_env() is torchax_core.default_env()
    with pytest.raises(AttributeError, match=r"'torchax.interop' has no 'nonsense' here.*migration.md"):
        interop.nonsense  # noqa: B018
    with pytest.raises(ImportError):
        import torchax.nonsense


def test_install_refuses_a_real_torchax(tmp_path) -> None:
    compat.uninstall()
    (tmp_path / "torchax").mkdir()
    (tmp_path / "torchax" / "__init__.py").write_text("real = True\n")
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from torchax_core import compat
try:
    compat.install()
except ImportError as error:
    assert "is installed, at " in str(error) and "force=True" in str(error)
else:
    raise SystemExit("installed over a real one")
import torchax
assert torchax.real
try:
    compat.install()
except ImportError as error:
    assert "imported already" in str(error)
else:
    raise SystemExit("installed over an imported one")
compat.install(force=True)
compat.install()
import torchax
assert not hasattr(torchax, "real") and torchax.default_env() is not None
compat.uninstall()
import torchax
assert torchax.real
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


def test_importing_changes_nothing() -> None:
    script = """
import os, sys
import jax, torch
def state():
    return (
        dict(os.environ), torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled(), jax.config.values,
        torch.get_float32_matmul_precision(), torch.backends.mha.get_fastpath_enabled(), "torchax" in sys.modules,
    )
import torchax_core  # registers the device; its own tests look at that
before = repr(state())
import torchax_core.checkpoint, torchax_core.compat, torchax_core.flax, torchax_core.interop, torchax_core.mesh_util
import torchax_core.modes, torchax_core.train, torchax_core.weights
assert repr(state()) == before
assert not {"orbax", "flax", "optax", "safetensors"} & set(sys.modules)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 5)
        self.fc2 = nn.Linear(5, 3)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x.view(-1, 6)))))

    def hidden(self, x):
        return self.fc1(x)


def test_a_training_program() -> None:
    """The shape of google/torchax's training example: JittableModule, optax, make_train_step, jax_jit with donation."""
    import torchax
    from torchax import interop, train

    env = torchax.enable_globally()
    torch.manual_seed(0)
    cpu = Net()
    model = Net()
    model.load_state_dict(cpu.state_dict())
    model.to("jax")
    jittable = interop.JittableModule(model, env=env)
    weights, buffers = jittable.params, jittable.buffers
    optimizer = optax.adam(0.01)
    opt_state = interop.call_jax(optimizer.init, weights)
    loss_fn = nn.CrossEntropyLoss()

    def model_fn(weights, buffers, args):
        rng = jax.random.key_data(env.get_and_rotate_prng_key())
        return jittable.functional_call("forward", weights, buffers, rng, *args)

    step = train.make_train_step(model_fn, loss_fn, optimizer)
    step = interop.jax_jit(step, kwargs_for_jax_jit={"donate_argnums": (0, 2)})
    reference = torch.optim.Adam(cpu.parameters(), lr=0.01)
    for _ in range(3):
        x, y = torch.randn(4, 2, 3), torch.randint(0, 3, (4,))
        loss, weights, opt_state = step(weights, buffers, opt_state, (x.to("jax"),), y.to("jax"))
        reference.zero_grad()
        wanted = loss_fn(cpu(x), y)
        wanted.backward()
        reference.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    for name, parameter in cpu.named_parameters():
        torch.testing.assert_close(weights[name].cpu(), parameter.detach(), rtol=1e-3, atol=1e-4)


def test_environment_as_context_and_decorator() -> None:
    import torchax
    import torchax.tensor

    env = torchax.default_env()

    @env
    def run():
        return torch.full((3, 3), -1).to("jax").abs()

    with env:
        env.manual_seed(torch.tensor(2))
        x = torch.randn(2, 2, device="jax")
    env.manual_seed(2)
    assert torch.equal(x.cpu(), torch.randn(2, 2, device="jax").cpu())
    assert isinstance(run(), torchax.tensor.Tensor) and issubclass(type(x[0]), torchax.tensor.Tensor)
    assert isinstance(x[0], torchax.tensor.View) and not isinstance(torch.ones(1), torchax.tensor.Tensor)
    made = torchax.tensor.Tensor(jnp.ones(2), env, requires_grad=True)
    assert isinstance(made, torchax_core.Tensor) and made.requires_grad
    assert torchax.tensor.Environment(torchax.config.Configuration()).config.donate


def test_modes() -> None:
    import torchax

    before = torch.get_float32_matmul_precision()
    try:
        torchax.enable_performance_mode()
        assert torch.get_float32_matmul_precision() == "medium"
        torchax.enable_accuracy_mode()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    torchax.disable_globally()
    with torch.device("jax"), torchax.disable_temporarily():
        assert torch.ones(1).device.type == "cpu"
    with torchax.disable_temporarily(), torch.device("meta"):
        assert torch.ones(1).device.type == "meta"


def test_compile() -> None:
    import torchax

    model = Net().to("jax")
    options = torchax.CompileOptions(methods_to_compile=["forward", "hidden"])
    compiled = torchax.compile(model, options)
    x = torch.randn(4, 6, device="jax")
    torch.testing.assert_close(compiled(x).cpu(), model(x).cpu())
    torch.testing.assert_close(compiled.hidden(x).cpu(), model.hidden(x).cpu())
    assert torchax.compile(lambda x: x + 1)(x)[0, 0].item() == pytest.approx(x[0, 0].item() + 1)
    with pytest.raises(ValueError, match="'jax' only, but got 'dynamo'"):
        torchax.compile(model, torchax.CompileOptions(mode="dynamo"))


def test_configuration_warns_of_what_has_no_effect() -> None:
    from torchax.config import Configuration

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Configuration().packs is None
    with pytest.warns(UserWarning, match="use_tpu_flash_attention has no effect.*override"):
        Configuration(use_tpu_flash_attention=True)


def test_extract_jax_and_checkpoint(tmp_path) -> None:
    import torchax

    model = Net()
    weights, function = torchax.extract_jax(model)
    assert model.fc1.weight.device.type == "cpu"
    x = torch.randn(2, 6)
    out = function(weights, args=(), kwargs={"x": jnp.asarray(x.numpy())})
    np.testing.assert_allclose(out, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    state = {"model": model.state_dict(), "opt_state": optax.adam(1e-3).init(weights), "epoch": 1}
    torchax.save_checkpoint(state, str(tmp_path / "c"), step=1)
    loaded = torchax.load_checkpoint(str(tmp_path / "c"))
    assert loaded["epoch"] == 1 and isinstance(loaded["model"]["fc1.weight"], jax.Array)
    assert len(jax.tree.leaves(loaded["opt_state"])) == len(jax.tree.leaves(state["opt_state"]))
    with pytest.raises(FileNotFoundError):
        torchax.load_checkpoint("/no/such/checkpoint")


def test_mappings() -> None:
    from torchax.ops import mappings

    for theirs, ours in mappings.TORCH_DTYPE_TO_JAX.items():
        assert mappings.t2j_dtype(theirs) == ours and mappings.j2t_dtype(ours) == theirs
    assert mappings.j2t_dtype(jnp.bfloat16.dtype) is torch.bfloat16
    x = torch.randn(3, 2).to(torch.bfloat16).t()
    array = mappings.t2j(x)
    assert array.shape == (2, 3) and torch.equal(mappings.j2t(array), x)
    assert mappings.t2j(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]


def test_registering_ops() -> None:
    import torchax
    from torchax.ops import jaten, jtorch, ops_registry

    x = torch.ones(2, device="jax")
    seen = []

    @jtorch.register_function(torch.nn.functional.one_hot)
    def one_hot(tensor, num_classes=-1):
        return jax.nn.one_hot(tensor, num_classes) * 2

    @jaten.op(torch.ops.aten.sinh, torch.ops.aten.cosh)
    def constant(self):
        return jnp.full_like(self, 7)

    def tanh(self, env):
        seen.append(env)
        return self * 3

    ops_registry.register_torch_dispatch_op(torch.ops.aten.tanh, tanh, is_jax_function=False, needs_env=True)
    try:
        assert torch.nn.functional.one_hot(torch.tensor([1], device="jax"), 2).tolist() == [[0, 2]]
        assert torch.sinh(x).tolist() == torch.cosh(x).tolist() == [7, 7]
        assert torch.tanh(x).tolist() == [3, 3] and seen == [torchax.default_env()]

        @jaten.op(torch.ops.aten.sum)
        def total(x, axis=None, keepdims=False, dtype=None):
            return jnp.sum(x * 10, axis=tuple(axis) if axis else None, keepdims=keepdims)

        assert torch.sum(x.reshape(1, 2), 1, keepdim=True).tolist() == [[20]] and torch.sum(x).item() == 20
        assert ops_registry.all_aten_ops[torch.ops.aten.sinh].func is constant
    finally:
        for table in (ops_registry.all_aten_ops, ops_registry.all_torch_functions):
            for registered in table.values():
                registered.override.undo()
            table.clear()
    assert torch.tanh(x)[0].item() == pytest.approx(0.76159, abs=1e-4)


def test_amp_and_util() -> None:
    import torchax.amp
    from torchax import util

    a = torch.ones(2, 2, device="jax")
    with torchax.amp.autocast("jax", dtype=torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
    even, odd = util.partition([1, 2, 3], lambda n: n % 2 == 0)
    assert (even, odd) == ([None, 2, None], [1, None, 3]) and util.merge(even, odd) == [1, 2, 3]


def test_the_migration_page_lists_every_name() -> None:
    import importlib

    text = (ROOT / "docs/migration.md").read_text()
    for name, target in compat.MODULES.items():
        assert f"`{name}`" in text, f"docs/migration.md does not mention {name}"
        if target.startswith("torchax_core.compat") or name in (
            "torchax.interop",
            "torchax.train",
            "torchax.mesh_util",
        ):
            for public in importlib.import_module(target).__all__:
                assert re.search(rf"`(\w+\.)*{public}\b", text), f"docs/migration.md does not mention {name}.{public}"

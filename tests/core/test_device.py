"""device="jax" wherever torch takes a device: making, moving, saving, printing, seeding; and torch's own errors."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import torchax_core


def test_factories_and_contexts() -> None:
    assert torch.randn(2, device="jax").device == torch.device("jax", 0)
    assert torch.tensor([1, 2], device="jax").tolist() == [1, 2]
    with torch.device("jax"):
        assert torch.zeros(2).device.type == "jax"
        assert nn.Linear(2, 3).weight.device.type == "jax"
    assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device("jax")
    try:
        assert torch.ones(2).device.type == "jax"
    finally:
        torch.set_default_device(None)
    assert torch.accelerator.current_accelerator() == torch.device("jax")
    assert torch.jax.device_count() == 1


MAKERS = {
    "tensor": lambda: torch.tensor(0, device="jax"),
    "tensor with gradients": lambda: torch.tensor([1.0, 2.0], device="jax", requires_grad=True),
    "new_tensor": lambda: torch.ones(2, device="jax").new_tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor(3, device="jax"),
    "as_tensor of numpy": lambda: torch.as_tensor(np.ones(3), device="jax"),
    "asarray": lambda: torch.asarray([1, 2], device="jax"),
    "from_numpy": lambda: torch.from_numpy(np.ones(3)).to("jax"),
    "scalar_tensor": lambda: torch.scalar_tensor(2.0, device="jax"),
    "full": lambda: torch.full((2,), 1.0, device="jax"),
    "arange": lambda: torch.arange(3, device="jax"),
    "rand": lambda: torch.rand(3, device="jax"),
    "randint": lambda: torch.randint(0, 3, (3,), device="jax"),
    "randperm": lambda: torch.randperm(3, device="jax"),
    "normal": lambda: torch.normal(0.0, 1.0, (3,), device="jax"),
    "empty_strided": lambda: torch.empty_strided((2, 2), (1, 2), device="jax"),
    "module": lambda: nn.Linear(2, 2, device="jax").weight.detach(),
    "default device": lambda: torch.tensor([1]),
}


def test_factories_make_fake_tensors_under_a_mode() -> None:
    mode = FakeTensorMode()
    for name, make in MAKERS.items():
        with torch.device("jax"):
            real = make()
            with mode:
                fake = make()
        assert isinstance(real, torchax_core.Tensor), name
        assert isinstance(fake, FakeTensor) and fake.device == real.device, name
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride()), name
        assert fake.requires_grad == real.requires_grad, name


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    + [torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_round_trip_keeps_every_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 100, (3, 4), dtype=torch.int32).to(torch.uint8)
    x = bits.view(dtype) if dtype.itemsize == 1 and dtype is not torch.bool else bits.to(dtype)
    ours = x.to("jax")
    assert ours.dtype is dtype and ours.shape == x.shape
    back = ours.cpu()
    assert back.dtype is dtype
    assert torch.equal(
        back.view(torch.uint8) if dtype.itemsize == 1 else back, x.view(torch.uint8) if dtype.itemsize == 1 else x
    )


def test_64_bit_values_are_exact_and_jax_stays_as_it_was() -> None:
    assert torch.tensor(2**62 + 1, device="jax").item() == 2**62 + 1
    assert (torch.tensor(0.1, dtype=torch.float64, device="jax") * 3).item() == 0.1 * 3
    assert jnp.arange(3).dtype == jnp.int32
    assert jnp.ones(2).dtype == jnp.float32


def test_jax_arrays_both_ways() -> None:
    array = jnp.arange(4.0)
    x = torchax_core.tensor(array)
    assert x.jax() is array
    x.add_(1)
    assert x.tolist() == [1, 2, 3, 4] and array.tolist() == [0, 1, 2, 3]
    assert isinstance(torch.ones(2, device="jax").jax(), jax.Array)
    assert jnp.from_dlpack(x).tolist() == [1, 2, 3, 4]
    with pytest.raises(torchax_core.errors.ConversionError, match="takes a jax array"):
        torchax_core.tensor([1, 2])


def test_module_to_keeps_ties_and_optimizers() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("jax")
    assert model[0].weight is model[1].weight and isinstance(model[0].weight, nn.Parameter)
    before = model[0].weight.cpu()
    model(torch.ones(2, 3, device="jax")).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight.cpu())


def test_copies_and_files(tmp_path) -> None:
    weight = nn.Parameter(torch.randn(2, 3, device="jax"))
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert isinstance(copied, nn.Parameter) and copied.device.type == "jax"
        assert torch.equal(copied.cpu(), weight.cpu()) and copied is not weight
    model, target = nn.Linear(3, 2).to("jax"), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt")["weight"].device.type == "jax"
    on_cpu = torch.load(tmp_path / "m.pt", map_location="cpu")
    assert on_cpu["weight"].device.type == "cpu"
    target.load_state_dict(on_cpu)
    assert torch.equal(target.weight, model.weight.cpu())
    buffer = io.BytesIO()
    torch.save(target.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="jax")
    assert loaded["weight"].device.type == "jax" and torch.equal(loaded["weight"].cpu(), target.weight)


def test_print_reads_like_torch() -> None:
    assert repr(torch.tensor([1.5, 2], device="jax")) == "tensor([1.5000, 2.0000], device='jax:0')"
    assert repr(torch.ones(1, dtype=torch.float64, device="jax")) == "tensor([1.], device='jax:0', dtype=torch.float64)"
    x = torch.ones(1, device="jax", requires_grad=True)
    assert repr(x) == "tensor([1.], device='jax:0', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([1.], device='jax:0'")


def test_seeds() -> None:
    torch.manual_seed(3)
    a = torch.randn(4, device="jax")
    state = torch.jax.get_rng_state()
    b = torch.randn(4, device="jax")
    torch.jax.set_rng_state(state)
    assert torch.equal(b.cpu(), torch.randn(4, device="jax").cpu())
    torch.manual_seed(3)
    assert torch.equal(a.cpu(), torch.randn(4, device="jax").cpu())
    assert not torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(2, device=d).sum(5),
        lambda d: torch.ones(2, dtype=torch.int64, device=d).add_(1.5),
        lambda d: torch.ones(2, device=d).view(3),
        lambda d: torch.ones(1, device=d).expand(3).add_(1),
        lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
        lambda d: -torch.ones(2, dtype=torch.bool, device=d),
    ],
)
def test_bad_calls_raise_what_cpu_raises(call) -> None:
    with pytest.raises(Exception) as wanted:  # whatever CPU torch raises is the reference
        call("cpu")
    with pytest.raises(type(wanted.value)) as got:
        call("jax")
    assert str(got.value).splitlines()[0] == str(wanted.value).splitlines()[0]


def test_mixed_devices_name_the_op() -> None:
    with pytest.raises(RuntimeError, match=r"same device.*jax:0 and cpu.*aten::add.Tensor"):
        torch.ones(2, device="jax") + torch.ones(2)
    assert (torch.ones(2, device="jax") + torch.tensor(1.0)).tolist() == [2, 2]
    with pytest.raises(TypeError, match="can't convert jax:0 device type tensor to numpy"):
        torch.ones(2, device="jax").numpy()


def test_an_error_in_a_backward_reaches_the_user() -> None:
    def broken(self, other):
        raise ValueError("boom")

    y = torch.exp(torch.ones(2, device="jax", requires_grad=True))
    with torchax_core.default_env().override_op_definition("aten::mul.Tensor", broken, is_jax_function=True):
        with pytest.raises(ValueError, match="boom"):
            y.sum().backward()


def test_importing_changes_nothing_else() -> None:
    code = (
        "import torch, jax; before = (torch.get_default_device(), jax.config.values.copy(), dict(__import__('os').environ));"
        "import torchax_core;"
        "assert before == (torch.get_default_device(), jax.config.values.copy(), dict(__import__('os').environ));"
        "assert torch.utils._python_dispatch._get_current_dispatch_mode() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_autocast() -> None:
    layer = nn.Linear(4, 3).to("jax")
    x = torch.randn(2, 4, device="jax")
    with torch.autocast("jax", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        assert y.softmax(-1).dtype is torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert layer(x).dtype is torch.float32


def test_numbers_that_are_equal_but_not_the_same() -> None:
    for value in (-0.0, 0.0, float("nan"), complex(-1, -0.0), complex(-1, 0.0), True, 1, 1.0):
        zero = torch.zeros(1, dtype=torch.complex64 if isinstance(value, complex) else torch.float32)
        for wanted, got in ((torch.full_like(zero, value), torch.full_like(zero.to("jax"), value)),):
            assert repr(wanted.item()) == repr(got.item())
    assert torch.arange(0.0, 3.0, device="jax").dtype is torch.float32
    assert torch.arange(0, 3, device="jax").dtype is torch.int64


def test_wrong_device_names_the_argument() -> None:
    x = torch.ones(2, device="jax")
    with pytest.raises(RuntimeError, match="argument tensor2 in aten::addcmul"):
        torch.addcmul(x, x, torch.ones(2), value=2)
    with pytest.raises(RuntimeError, match="argument tensors in aten::cat"):
        torch.cat([x, torch.ones(2)])
    with pytest.raises(RuntimeError, match="argument self in aten::add_"):
        torch.ones(()).add_(x[0])


@pytest.mark.parametrize("spec", ["", ".3f", ">8", ".2e"])
def test_a_number_in_an_f_string(spec):
    x = torch.tensor([1.5, 2.25], requires_grad=True)
    ours = x.detach().to("jax").requires_grad_()
    for of in (lambda t: t.sum(), lambda t: t[1], lambda t: t.detach()[0]):
        assert format(of(ours), spec) == format(of(x), spec)


def test_a_tensor_in_an_f_string():
    ours = torch.ones(2, device="jax")
    assert f"{ours}" == str(ours) and "device='jax" in str(ours)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{ours:.2f}"
    with pytest.raises(torchax_core.errors.DataDependentError):
        torchax_core.jit(lambda x: f"{x.sum():.2f}")(ours)
    assert "float32" in torchax_core.jit(lambda x: f"{x.sum()}")(ours)

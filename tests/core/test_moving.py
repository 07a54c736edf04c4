"""moving.py, lazy.py: modules go to the device and come back as they do to every device of torch's own; each test runs on the
CPU too, where nothing moves, and expects the same."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import torchax_core  # noqa: F401

DEVICES = pytest.mark.parametrize("device", ["cpu", "jax"])
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Lazy modules")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class WithViews(nn.Module):
    """Plain attributes: a view of the parameter, and what was computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.part, self.twice = self.weight[:2], self.weight * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def masked() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(3, 4), "weight", 2)


MODULES: dict[str, Callable[[], Any]] = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "weight_norm of an LSTM": lambda: nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="cayley"),
    "pruned": masked,
    "tied": Tied,
    "with views": WithViews,
}


def trained(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_move_there_and_back(name: str, swap: bool) -> None:
    x = torch.ones(2, 3)
    torch.manual_seed(0)
    reference = MODULES[name]()
    torch.manual_seed(0)
    module = MODULES[name]()
    parameters = list(module.parameters())
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.to("jax")
        assert all(p.device.type == "jax" for p in module.parameters())
        torch.testing.assert_close(trained(module, x.to("jax")), trained(reference, x))
        module.cpu()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    torch.testing.assert_close(trained(module, x), trained(reference, x))
    module.to("jax")
    state = {key: value.cpu() for key, value in copy.deepcopy(module.state_dict()).items()}
    torch.testing.assert_close(state, dict(reference.state_dict()))


@DEVICES
def test_a_parameter_stays_itself(device: str) -> None:
    class Marked(nn.Parameter):
        pass

    calls: list[str] = []
    module = nn.Linear(3, 4)
    module.weight = weight = Marked(torch.ones(4, 3))
    known = weakref.ref(weight)
    weight.decay = False
    handle = weight.register_hook(lambda gradient: calls.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    for there in (device, device, "cpu"):
        module.to(there)
        assert module.weight is weight is known() and weight.decay is False and isinstance(weight, nn.Parameter)
        trained(module, torch.ones(2, 3, device=there))
    assert calls == ["hook", "after"] * 3 and type(weight) is Marked
    module.to(device).float()
    handle.remove()
    trained(module, torch.ones(2, 3, device=device))
    assert calls == ["hook", "after"] * 3 + ["after"]


@DEVICES
def test_optimizers_follow_there_and_back(device: str) -> None:
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for there in (device, "cpu", device):
        module.to(there)
        before = module.b.weight.detach().clone()
        trained(module, torch.ones(2, 3, device=there))
        optimizer.step()
        assert module.a.weight is module.b.weight and not torch.equal(module.b.weight, before)


@DEVICES
@pytest.mark.parametrize(
    "again", [lambda m: m.to(m.weight.device), lambda m: m.float(), lambda m: m.train().double().float()]
)
def test_moves_that_move_nothing_between_forward_and_backward(device: str, again: Callable[[Any], Any]) -> None:
    module = nn.Linear(3, 4).to(device)
    y = module(torch.ones(2, 3, device=device)) + module.weight.square().sum()
    again(module)
    y.sum().backward()
    torch.testing.assert_close(module.weight.grad, 2 + 16 * module.weight.detach())


def test_a_backward_through_a_moved_parameter_is_refused() -> None:
    module = nn.Linear(3, 4)
    y = module(torch.ones(2, 3)).sum() + module.weight.square().sum()
    module.to("jax")
    with pytest.raises(RuntimeError, match="moved to or from device 'jax' since the forward"):
        y.backward()


@DEVICES
def test_gradients_go_along(device: str) -> None:
    module = nn.Linear(3, 4)
    trained(module, torch.ones(2, 3))
    gradient = module.weight.grad
    expected = gradient.clone()
    for there in (device, "cpu"):
        module.to(there)
        assert module.weight.grad is gradient and gradient.device.type == there
        torch.testing.assert_close(gradient.cpu(), expected)


@DEVICES
def test_assigning_cpu_data(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    data = torch.zeros(2)
    weight.data = data
    data += 1
    assert weight.device.type == "cpu" and type(weight) is nn.Parameter and weight.tolist() == [1, 1]
    assert weight.requires_grad


def test_what_cannot_become_a_cpu_tensor() -> None:
    result = torch.ones(2, device="jax", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"x = x.to\('cpu'\)"):
        result.data = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"to a Tensor on device cpu; move it first"):
        torch.ones(2, device="jax").data = torch.eye(2).to_sparse()


LAZY: dict[str, Callable[[str], nn.Module]] = {
    "moved": lambda device: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).to(device),
    "moved twice": lambda device: (
        nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).to(device).half().float().to(device)
    ),
    "made there": lambda device: nn.Sequential(nn.LazyConv2d(4, 3, device=device), nn.LazyBatchNorm2d(device=device)),
    "copied": lambda device: nn.Sequential(
        copy.deepcopy(nn.LazyConv2d(4, 3).to(device)), nn.LazyBatchNorm2d(device=device)
    ),
    "come back": lambda device: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).to("jax").to("cpu").to(device),
}


@DEVICES
@pytest.mark.parametrize("way", LAZY)
def test_lazy_modules(device: str, way: str) -> None:
    module = LAZY[way](device)
    assert all(map(nn.parameter.is_lazy, module[0].parameters()))
    assert {t.device.type for t in module.state_dict().values()} == {device}
    y = module(torch.ones(2, 3, 5, 5, device=device))
    assert y.shape == (2, 4, 3, 3) and y.device.type == device
    assert not any(map(nn.parameter.is_lazy, module.state_dict().values()))
    assert {t.device.type for t in module.state_dict().values()} == {device}
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    reference.load_state_dict({name: t.cpu() for name, t in module.state_dict().items()})
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(module.eval()(x.to(device)).cpu(), reference.eval()(x))
    y.square().sum().backward()
    assert module[0].weight.grad is not None


@DEVICES
def test_a_lazy_module_takes_weights_before_it_has_run(device: str) -> None:
    module = nn.LazyLinear(4).to(device)
    module.load_state_dict(nn.Linear(3, 4).state_dict())
    assert module.weight.shape == (4, 3) and module.weight.device.type == device
    copied = pickle.loads(pickle.dumps(nn.LazyLinear(4, device=device).weight))
    assert nn.parameter.is_lazy(copied) and copied.requires_grad and copied.device.type == device


def test_a_parameter_that_cannot_move_keeps_its_gradient() -> None:
    class Slotted(nn.Parameter):
        __slots__ = ("mark",)

    module = nn.Linear(3, 4)
    module.weight = Slotted(torch.ones(4, 3))
    trained(module, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        module.to("jax")
    assert module.weight.grad.sum() != 0 and type(module.weight) is Slotted

"""What is no tensor and changes between calls of a jitted function: the next call sees it, wherever it is kept."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax_core

SCALE = 2.0
TABLE = [2.0]
Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]
"""A function, and what changes what it computes."""


class Box:
    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)


class Color(enum.Enum):
    RED = 1.0
    BLUE = 2.0


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0


class Private:
    def __init__(self) -> None:
        self.__scale = [2.0]

    @property
    def scale(self) -> float:
        return self.__scale[0]

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * self.scale

    def change(self) -> None:
        self.__scale[0] = 3.0


def _set(owner: Any, **values: Any) -> Callable[[], Any]:
    return lambda: [setattr(owner, name, value) for name, value in values.items()]


# -- values in one place, that a function looks at in one way --------------------------------------

IN_A_BOX: dict[str, tuple[Any, Any, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "None": (None, 3.0, lambda x, v: x if v is None else x * v),
    "to None": (3.0, None, lambda x, v: x if v is None else x * v),
    "complex": (2 + 0j, 3j, lambda x, v: x * v),
    "dtype": (torch.float32, torch.float64, lambda x, v: x.to(v)),
    "size": (torch.Size([3, 4]), torch.Size([2, 6]), lambda x, v: x.reshape(v)),
    "slice": (slice(0, 2), slice(1, 3), lambda x, v: x[:, v]),
    "range": (range(2), range(1, 3), lambda x, v: x * sum(v)),
    "enum": (Color.RED, Color.BLUE, lambda x, v: x * v.value),
    "frozen set": (frozenset({1}), frozenset({1, 2}), lambda x, v: x * len(v)),
    "tuple": ((1.0, 2.0), (7.0, 2.0), lambda x, v: x * v[0]),
    "named tuple": (Pair(1.0, 2.0), Pair(4.0, 2.0), lambda x, v: x * v.a),
    "numpy scalar": (np.float32(2), np.float32(3), lambda x, v: x * v),
    "dataclass": (Frozen(), Frozen(3.0), lambda x, v: x * v.scale),
    "CPU tensor": (torch.tensor(2.0), torch.tensor(3.0), lambda x, v: x * v),
    "object": (Box(s=2.0), Box(s=3.0), lambda x, v: x * v.s),
    "function": (F.relu, F.gelu, lambda x, v: v(x)),
    "torch function": (torch.sin, torch.cos, lambda x, v: v(x)),
    "class": (nn.Tanh, nn.ReLU, lambda x, v: v()(x - 1)),
    "lambda": (lambda x: x * 2, lambda x: x * 3, lambda x, v: v(x)),
    "closure": (functools.partial(operator.mul, 2), functools.partial(operator.mul, 3), lambda x, v: v(x)),
}

CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "item of a list": (lambda: [1.0, 2.0], lambda v: v.__setitem__(0, 5.0), lambda x, v: x * v[0]),
    "longer list": (lambda: [1.0, 2.0], lambda v: v.append(5.0), lambda x, v: x * sum(v)),
    "deep inside": (
        lambda: {"a": {"b": [1, (3.0, 4.0)]}},
        lambda v: v["a"]["b"].__setitem__(1, (9.0, 4.0)),
        lambda x, v: x * v["a"]["b"][1][0],
    ),
    "numbers for keys": (lambda: {0: 1.0}, lambda v: v.__setitem__(0, 5.0), lambda x, v: x * v[0]),
    "new key": (dict, lambda v: v.__setitem__("k", 5.0), lambda x, v: x * v.get("k", 1.0)),
    "order of keys": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda v: v.move_to_end("a"),
        lambda x, v: x * next(iter(v.values())),
    ),
    "functions by name": (lambda: {"f": F.relu}, lambda v: v.update(f=F.gelu), lambda x, v: v["f"](x)),
    "set": (lambda: {1, 2}, lambda v: v.add(7), lambda x, v: x * len(v)),
    "deque": (lambda: collections.deque([1.0, 2.0], 2), lambda v: v.append(9.0), lambda x, v: x * sum(v)),
    "numpy array": (lambda: np.ones(3), lambda v: v.__setitem__(0, 4.0), lambda x, v: x * float(v[0])),
    "CPU scalar": (lambda: torch.tensor(2.0), lambda v: v.fill_(3.0), lambda x, v: x * v),
    "CPU index": (lambda: torch.tensor([0, 2]), lambda v: v.fill_(1), lambda x, v: x[v]),
    "slot": (Slotted, lambda v: setattr(v, "scale", 3.0), lambda x, v: x * v.scale),
    "private, behind a property": (Private, Private.change, lambda x, v: x * v.scale),
    "in a method": (Private, Private.change, lambda x, v: v.double(x)),
    "new attribute": (Box, lambda v: setattr(v, "s", 3.0), lambda x, v: x * getattr(v, "s", 1.0)),
    "namespace": (
        lambda: types.SimpleNamespace(_s=2.0),
        lambda v: setattr(v, "_s", 3.0),
        lambda x, v: x * v._s,
    ),
}


def _in_a_box(name: str) -> Case:
    before, after, use = IN_A_BOX[name]
    box = Box(_held=before)
    return lambda x: use(x, box._held), _set(box, _held=after)


def _changed(name: str) -> Case:
    make, change, use = CHANGED[name]
    box = Box(held=make())
    return lambda x: use(x, box.held), lambda: change(box.held)


# -- places ----------------------------------------------------------------------------------------


def closure() -> Case:
    scale, power = 2.0, (1.0, 0)

    def change() -> None:
        nonlocal scale, power
        scale, power = 3.0, (2.0, 0)

    return lambda x: x * scale ** power[0], change


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


_helper = _scaled


class Global(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _helper(x) * TABLE[0]


def global_in_forward() -> Case:
    globals().update(SCALE=2.0, TABLE=[2.0], _helper=_scaled)
    return Global(), lambda: TABLE.__setitem__(0, 5.0)


def global_in_a_helper() -> Case:
    globals().update(SCALE=2.0, TABLE=[2.0], _helper=_scaled)
    return Global(), lambda: globals().update(SCALE=4.0)


def helper_replaced() -> Case:
    globals().update(SCALE=2.0, TABLE=[2.0], _helper=_scaled)
    return Global(), lambda: globals().update(_helper=lambda x: x * 7)


def in_another_module() -> Case:
    module = types.ModuleType("torchax_test_settings")
    sys.modules[module.__name__] = module
    exec("scale = 2.0\ndef scaled(x): return x * scale", vars(module))
    return lambda x: module.scaled(x), lambda: vars(module).update(scale=3.0)


def defaults() -> Case:
    def scaled(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    return scaled, _set(scaled, __defaults__=(3.0,))


def attribute_of_a_function() -> Case:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.factor  # type: ignore[attr-defined]

    scaled.factor = 2.0  # type: ignore[attr-defined]
    return scaled, _set(scaled, factor=3.0)


def context() -> Case:
    scale = contextvars.ContextVar("scale", default=2.0)
    return lambda x: x * scale.get(), lambda: scale.set(3.0)


def attribute_of_a_class() -> Case:
    class Net(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return Net(), _set(Net, scale=3.0)


def hidden_by_the_object() -> Case:
    net, _ = attribute_of_a_class()
    return net, _set(net, scale=3.0)


def method_replaced() -> Case:
    class Net:
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    net = Net()
    return lambda x: net.twice(x), _set(Net, twice=lambda self, x: x * 3)


def forward_of_a_class() -> Case:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    net = Net()
    return lambda x: net(x), _set(Net, forward=lambda self, x: x * 3)


def forward_of_a_layer() -> Case:
    net = nn.Sequential(nn.Linear(3, 3)).to("jax")
    return net, _set(net[0], forward=lambda x: x * 3)


def settings_of_torchs_layers() -> Case:
    net = nn.Sequential(nn.MaxPool1d(1), nn.Conv1d(4, 4, 3, padding=1), nn.GELU()).to("jax")
    return net, _set(net[1], padding=(0,))


def string_of_a_layer() -> Case:
    net = nn.GELU()
    return net, _set(net, approximate="tanh")


def sizes_of_a_pool() -> Case:
    net = nn.MaxPool1d(1)
    return net, _set(net, kernel_size=3, stride=1, padding=1)


def list_of_a_module() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factors = nn.Linear(3, 3), [2.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for factor in self.factors:
                x = self.linear(x) * factor
            return x

    net = Net().to("jax")
    return net, lambda: net.factors.append(3.0)


def layers_swapped() -> Case:
    layers = nn.ModuleList([nn.Tanh(), nn.ReLU()])
    return lambda x: layers[0](x), lambda: layers.__setitem__(0, nn.Sigmoid())


def setting_of_an_optimizer() -> Case:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3, device="jax"))], lr=0.1)
    return lambda x: x * optimizer.param_groups[0]["lr"], lambda: optimizer.param_groups[0].update(lr=0.5)


def layers_that_are_only_looked_at() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, self.dropout.p)

    net = Net()
    return net, _set(net.dropout, p=1.0)


def mode_of_a_module_that_is_not_called() -> Case:
    class Net(nn.Module):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.training else x

    net = Net()
    return net.encode, net.eval


def attribute_of_a_derived_class() -> Case:
    class Base:
        factor = 2

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    class Derived(Base):
        pass

    held = Derived()
    return lambda x: held.scaled(x), _set(Derived, factor=3)


def beside_a_tensor() -> Case:
    box = Box(pair=(torch.ones(3, device="jax"), 2.0))
    return lambda x: x * box.pair[0] * box.pair[1], lambda: setattr(box, "pair", (box.pair[0], 3.0))


# -- hooks -----------------------------------------------------------------------------------------


def _hooked(first: bool, change: Callable[[Any, list[Any]], Any]) -> Case:
    net = nn.Sequential(nn.Linear(3, 3)).to("jax")
    handles = [net[0].register_forward_hook(lambda module, args, out: out * 3)] if first else []
    return lambda x: net(x), lambda: change(net[0], handles)


def _swap(layer: Any, handles: list[Any]) -> None:
    handles[0].remove()
    layer.register_forward_hook(lambda module, args, out: out * 5)


def hook_added() -> Case:
    return _hooked(False, lambda layer, _: layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,)))


def hook_removed() -> Case:
    return _hooked(True, lambda _, handles: handles[0].remove())


def hook_swapped() -> Case:
    return _hooked(True, _swap)


def number_in_a_hook() -> Case:
    net, box = nn.Sequential(nn.Linear(3, 3)).to("jax"), Box(scale=3.0)
    net[0].register_forward_hook(lambda module, args, out: out * box.scale)
    return lambda x: net(x), _set(box, scale=5.0)


def _gradient(add: Callable[[torch.Tensor], Any]) -> Case:
    weight = torch.ones(3, device="jax", requires_grad=True)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (x * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad * 1

    return gradient, lambda: add(weight)


def hook_of_a_tensor() -> Case:
    return _gradient(lambda weight: weight.register_hook(lambda grad: grad * 10))


def hook_after_accumulation() -> Case:
    return _gradient(lambda w: w.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 10)))


PLACES = [
    *(closure, global_in_forward, global_in_a_helper, helper_replaced, in_another_module, defaults, context),
    *(attribute_of_a_function, attribute_of_a_class, hidden_by_the_object, method_replaced, forward_of_a_class),
    *(forward_of_a_layer, settings_of_torchs_layers, string_of_a_layer, sizes_of_a_pool, list_of_a_module),
    *(
        layers_that_are_only_looked_at,
        mode_of_a_module_that_is_not_called,
        attribute_of_a_derived_class,
        beside_a_tensor,
    ),
    *(layers_swapped, setting_of_an_optimizer, hook_added, hook_removed, hook_swapped, number_in_a_hook),
    *(hook_of_a_tensor, hook_after_accumulation),
]
CASES: dict[str, Callable[[], Case]] = {
    **{f"{name} in a box": functools.partial(_in_a_box, name) for name in IN_A_BOX},
    **{name: functools.partial(_changed, name) for name in CHANGED},
    **{place.__name__: place for place in PLACES},
}


@pytest.mark.parametrize("name", CASES)
def test_seen_at_once(name: str) -> None:
    function, change = CASES[name]()
    x = torch.arange(1.0, 13.0, device="jax").reshape(4, 3) / 7
    run = torchax_core.jit(function)
    run(x)
    before = run(x)
    compiled = len(run.compilations)
    change()
    after, want = run(x), function(x)
    torch.testing.assert_close(after.detach().cpu(), want.detach().cpu())
    assert (after.shape, after.dtype, after.tolist()) != (before.shape, before.dtype, before.tolist())
    run(x)
    assert len(run.compilations) == compiled + 1, run.explain()


def test_equals_are_no_change() -> None:
    """Settings that are made anew, lists rebuilt with the same numbers, functions defined again: one program."""
    box = Box()
    one = 1

    def renew() -> None:
        box.settings = Box(scale=float("2.0"), names=["a", "b"], both=(1, {"k": [2.5]}))
        box.shift = lambda x: x + one
        box.clamp = functools.partial(torch.clamp, min=0.5)

    def function(x: torch.Tensor) -> torch.Tensor:
        s = box.settings
        return box.clamp(box.shift(x * s.scale * len(s.names) * s.both[1]["k"][0]))

    renew()
    run, x = torchax_core.jit(function), torch.ones(3, device="jax")
    for _ in range(4):
        assert run(x).tolist() == [11, 11, 11]
        renew()
    assert len(run.compilations) == 1, run.explain()
    box.settings.both[1]["k"][0] = 1.0  # of the one that is there now
    assert run(x).tolist() == [5, 5, 5]
    assert "[0] was 2.5, and is 1.0 now" in run.explain()


def test_counts_and_histories_that_nobody_reads_cost_one_trace() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step, self.seen, self.losses, self._last = 0, [0], [], None
            self.weight = nn.Parameter(torch.ones(3, device="jax"))
            self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

        def train(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (x * self.weight).sum()
            loss.backward()
            self.optimizer.step()
            return loss

    trainer = Trainer()
    run = torchax_core.jit(trainer.train)
    for i in range(4):
        loss = run(torch.ones(3, device="jax"))
        trainer.step += 1
        trainer.seen[0] = i
        trainer.losses.append(loss.item())
        trainer._last = loss.item()
    assert len(run.compilations) <= 2, run.explain()


def test_shapes_that_depend_on_constants_are_known_in_a_trace() -> None:
    def run(x):
        counts = torch.tensor([1, 2, 0, 1], device=x.device)
        return x.repeat_interleave(counts, 0) + x[torch.nonzero(counts)[:, 0]].sum()

    x = torch.arange(8.0).reshape(4, 2)
    assert torch.equal(torchax_core.jit(run)(x.to("jax")).cpu(), run(x))

"""The hardest case of what torchax_core.jit promises: each program runs on the CPU, and jitted on "jax"; results and all that
it touches must be the same after every call."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import torchax_core

CASES: dict[str, Callable[[str], Any]] = {}


def case(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """make(device) -> the step, for each call what makes its arguments, and what else to look at afterwards."""
    CASES[make.__name__] = make
    return make


class Box:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("h",)


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    return module


def pair(device: str, value: float) -> torch.Tensor:
    return torch.full((2,), float(value)).to(device)


# -- arguments and results ---------------------------------------------------------------------------------------------


@case
def aliasing_arguments(device):
    def step(x, y, z):
        x.add_(1)
        z.mul_(2)
        return x + y, z[0] + y.sum()

    x = torch.arange(6.0).reshape(2, 3).to(device)
    calls = [(x, x, x), (x, x[0], x), (x[0], x[1], x), (x[:, 1], x.t()[1], x.view(-1)), (x.clone(), x, x)]
    return step, [lambda c=c: c for c in calls], lambda: x


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: dict


torch.utils._pytree.register_dataclass(Data)
Named = collections.namedtuple("Named", "u v")


@case
def pytrees(device):
    def step(tree, named):
        return {
            "data": Data(tree["d"].a + 1, {"k": tree["d"].b["k"] * named.u}),
            "named": Named(named.v, [named.u, None, 3, "s"]),
            "ordered": collections.OrderedDict(z=tree["x"][0], a=tree["x"][1]),
            "default": collections.defaultdict(list, {"q": named.u * 2}),
            "deque": collections.deque([named.u, 1]),
        }

    x = pair(device, 2)
    argument = {"d": Data(x, {"k": x * 2}), "x": (x, [x * 3])}
    return step, [lambda: (argument, Named(x + 1, x * 5))] * 2, lambda: x


@case
def arguments_that_change(device):
    tree = {"a": pair(device, 1), "list": [pair(device, 2)]}

    def step(tree, x):
        tree["a"] = tree["a"] * 2 + x
        tree["list"].append(tree["a"] + x)
        tree.setdefault("new", x * 3)
        return tree["list"][0] * 1

    return step, [lambda i=i: (tree, pair(device, i)) for i in range(3)], lambda: tree


# -- state -------------------------------------------------------------------------------------------------------------


@case
def tied_weights(device):
    model = filled(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)))
    model[1].weight = model[0].weight
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        return loss

    tokens = torch.tensor([1, 2, 3]).to(device)
    return step, [lambda: (tokens,)] * 3, lambda: ([*model.parameters()], model[1].weight is model[0].weight)


@case
def views_of_state(device):
    base = torch.zeros(3, 4).to(device)
    row, column, flat = base[1], base.t()[2], base.view(-1)

    def step(x):
        row.add_(x)
        column.mul_(2)
        flat[0] = x.sum()
        base.diagonal().sub_(1)
        base[:, 1:3].copy_(base[:, 0:2].clone())
        return column + row[:3]

    return step, [lambda i=i: (torch.full((4,), float(i)).to(device),) for i in range(3)], lambda: (base, row, column)


SCALE: Any = None


@case
def holders(device):
    class Settings:
        scale = pair(device, 2)

    partial = functools.partial(lambda w, x: w * x, pair(device, 3))
    box = Box(functions=[lambda x: x + box.t], t=pair(device, 1))
    globals()["SCALE"] = pair(device, 5)

    def default(x, w=pair(device, 7)):  # noqa: B008
        return x * w

    def step(x):
        return box.functions[0](partial(x)) * Settings.scale + SCALE + default(x)

    def change(number):
        if number == 1:
            box.t = pair(device, 10)
        if number == 2:
            globals()["SCALE"] = pair(device, 50)
        if number == 3:
            Settings.scale = pair(device, 20)
        return (pair(device, 1),)

    return step, [functools.partial(change, i) for i in range(4)], lambda: box.t


@case
def rebound_attributes(device):
    box = Box(h=pair(device, 1), a=pair(device, 2), b=pair(device, 3), pair=None, seen=[])
    slots = Slots()
    slots.h = pair(device, 4)

    def step(x):
        box.h.add_(1)
        box.h = box.h * 0.5 + x
        box.a, box.b = box.b, box.a
        box.pair = (x * 2, box.a + 1) if box.pair is None else (box.pair[1] * 2, box.pair[0] + x)
        slots.h = slots.h + box.h
        return box.a * 1

    def observe():
        box.seen.append(box.h)  # those of earlier calls keep their values
        return box.h, box.a, box.b, box.pair, slots.h, box.seen

    return step, [lambda i=i: (pair(device, i),) for i in range(4)], observe


@case
def rebound_items_and_cells(device):
    window, recent = (
        [pair(device, i) for i in range(3)],
        collections.deque([pair(device, 1), pair(device, 2)], maxlen=2),
    )
    memory: dict[str, Any] = {}
    last = hidden = pair(device, 1)

    def step(x):
        nonlocal hidden, last
        window.append(window[0] + x)
        window.pop(0)
        recent.append(recent[0] + x)
        if "m" not in memory:
            memory["m"] = torch.zeros_like(x)
        memory["m"] = memory["m"] * 0.5 + x
        result = last + x
        hidden, last = hidden * 2 + x, x
        return result

    return (
        step,
        [lambda i=i: (pair(device, i),) for i in range(4)],
        lambda: (window, [*recent], memory, hidden, last),
    )


@case
def rebound_buffers(device):
    model = filled(nn.Linear(2, 2)).to(device)
    model.register_buffer("average", pair(device, 1))

    def step(x):
        with torch.no_grad():
            model.average = model.average * 0.5 + model(x)
            return model.average * 1

    return step, [lambda i=i: (pair(device, i),) for i in range(3)], lambda: model.average


@case
def methods(device):
    class Trainer:
        def __init__(self):
            self.weight, self.last = pair(device, 1), None

        def step(self, x):
            self.last = x * self.weight
            self.weight = self.weight + self.last
            return self.last.sum()

    trainer = Trainer()
    return trainer.step, [lambda i=i: (pair(device, i),) for i in range(3)], lambda: (trainer.weight, trainer.last)


@case
def changed_models(device):
    model = filled(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 2))).to(device)
    doubled = {name: value * 2 for name, value in model.state_dict().items()}
    tripled = {name: value * 3 for name, value in doubled.items()}
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: model[0].weight.requires_grad_(False),
        lambda: model[0].weight.requires_grad_(True),
        lambda: model.load_state_dict(doubled),
        lambda: model.load_state_dict(tripled, assign=True),
        lambda: setattr(model, "2", filled(nn.Linear(3, 2, bias=False)).to(device)),
        lambda: model[0].weight.data.fill_(2.0),
        lambda: setattr(model[0], "bias", None),
        lambda: setattr(model[0].weight, "data", torch.ones(3, 3).to(device)),
        lambda: setattr(model, "1", nn.Tanh()),
        lambda: model.append(nn.Sigmoid()),
    ]

    def step(x):
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    def call(change):
        change()
        return (torch.ones(2, 3).to(device),)

    return (
        step,
        [functools.partial(call, change) for change in changes],
        lambda: [(p.detach(), p.grad) for p in model.parameters()],
    )


# -- autograd and modes ------------------------------------------------------------------------------------------------


@case
def nested_jit(device):
    weight, count = torch.ones(3).to(device).requires_grad_(), torch.zeros(()).to(device)
    jit = torchax_core.jit if device == "jax" else (lambda f: f)

    @jit
    def inner(x):
        count.add_(1)
        return x * weight

    @jit
    def middle(x):
        return inner(inner(x)).sin()

    def step(x):
        weight.grad = None
        loss = middle(x).sum()
        loss.backward()
        return loss, inner(x).detach()

    return step, [lambda: (torch.arange(3.0).to(device),)] * 2, lambda: (weight.grad, count)


@case
def hooks(device):
    model = filled(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))).to(device)
    seen, gradient, given = torch.zeros(3).to(device), torch.zeros(3, 3).to(device), torch.zeros(()).to(device)
    model[0].register_forward_hook(lambda module, args, out: (seen.copy_(out.detach()[0]), out * 2)[1])
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].weight.register_hook(lambda g: (gradient.add_(g), g * 0.5)[1])
    model[2].register_full_backward_hook(lambda module, grads, outs: (given.add_(outs[0].sum()), None)[1])
    model[2].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(3), None)[1])

    def step(x):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    return (
        step,
        [lambda i=i: (torch.full((2, 3), float(i)).to(device),) for i in range(2)],
        lambda: (seen, gradient, given, [p.grad for p in model.parameters()]),
    )


@case
def grad_modes(device):
    weight = torch.ones(3).to(device).requires_grad_()
    modes = {"no": torch.no_grad, "inference": torch.inference_mode, "yes": torch.enable_grad}

    def step(x, mode):
        with modes[mode]():
            y = x * weight
        return y * 2, y.requires_grad

    return step, [lambda m=m: (torch.ones(3).to(device), m) for m in (*modes, "no")], lambda: weight


@case
def autocast(device):
    weight = torch.ones(3, 3).to(device)

    def step(x, inside):
        if inside:
            with torch.autocast(device, dtype=torch.bfloat16):
                return x @ weight
        return x @ weight

    return step, [lambda i=i: (torch.ones(2, 3).to(device), i) for i in (True, False)], lambda: weight


@case
def second_derivatives_and_checkpoints(device):
    weight = torch.linspace(-1, 1, 3).to(device).requires_grad_()

    def step(x, reentrant):
        weight.grad = None
        (g,) = torch.autograd.grad((weight.sin() * x).sum(), weight, create_graph=True)
        loss = (g**2).sum() + checkpoint(lambda x: (x * weight).sin() * weight, x, use_reentrant=reentrant).sum()
        loss.backward()
        return loss

    calls = [lambda r=r: (torch.ones(3).to(device).requires_grad_(), r) for r in (False, True)]
    return step, calls, lambda: weight.grad


# -- training ----------------------------------------------------------------------------------------------------------


@case
def batchnorm_train_and_eval(device):
    model = filled(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))).to(device)

    def call(number):
        model.train(number in (0, 1, 3))
        return (torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(device),)

    return lambda x: model(x).detach(), [functools.partial(call, i) for i in range(4)], lambda: [*model.buffers()]


@case
def averages(device):
    model = filled(nn.Linear(3, 2)).to(device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )  # counts on the CPU
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                by_hand[name].lerp_(p, 0.1)
        average.update_parameters(model)
        return loss

    return (
        step,
        [lambda: (torch.ones(2, 3).to(device),)] * 3,
        lambda: (by_hand, [*average.module.parameters()], average.n_averaged),
    )


@case
def accumulation_clipping_and_schedule(device):
    model = filled(nn.Linear(3, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step(x, last):
        loss = (model(x) ** 2).mean() / 2
        loss.backward()
        if not last:
            return loss
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    def call(number):
        if number and number % 2 == 0:
            schedule.step()
        return torch.full((2, 3), 1.0 + number).to(device), bool(number % 2)

    return step, [functools.partial(call, i) for i in range(6)], lambda: [*model.parameters()]


@case
def grad_scaler(device):
    model = filled(nn.Linear(3, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    calls = [lambda v=v: (torch.full((2, 3), v).to(device),) for v in (1.0, 1.0, float("inf"), 1.0)]
    return step, calls, lambda: ([*model.parameters()], scaler.get_scale())


def _run(make: Callable[[str], Any], device: str) -> list[Any]:
    step, calls, observe = make(device)
    run = torchax_core.jit(step) if device == "jax" else step
    found = []
    for call in calls:
        result = run(*call())
        found.append(
            tree_map(lambda t: t.detach().cpu().clone() if isinstance(t, torch.Tensor) else t, (result, observe()))
        )
    return found


@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name: str) -> None:
    with warnings.catch_warnings():
        if name == "averages":
            warnings.filterwarnings("ignore", "(?s).*wrote to a tensor on cpu")
        got, want = _run(CASES[name], "jax"), _run(CASES[name], "cpu")
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(want)
    for ours, theirs in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5, equal_nan=True)
        else:
            assert ours == theirs


# -- what has no counterpart on the CPU --------------------------------------------------------------------------------


def test_no_tensor_is_a_constant_of_the_program() -> None:
    """Whatever way the function meets it, a tensor of 1000 elements is an input."""
    big = [torch.full((1000,), float(i), device="jax") for i in range(6)]
    box = Box(attribute=big[0], nested={"a": [big[1]]})
    model = nn.BatchNorm1d(1000).to("jax").eval()

    class Settings:
        value = big[2]

    globals()["SCALE"] = big[3]

    def step(x, w=big[4]):
        with torch.no_grad():
            return model(x[None]) + box.attribute + box.nested["a"][0] + Settings.value + SCALE + w + big[5]

    run = torchax_core.jit(step)
    run(torch.ones(1000, device="jax"))
    (program,) = run._programs.popitem()[1]
    sizes = [getattr(constant, "size", 1) for constant in program.jaxpr.consts]
    assert all(size < 1000 for size in sizes) and len(program.captured) == 6 + 4
    assert "1000" not in "".join(line for line in str(program.jaxpr).splitlines() if "constant" in line)


def test_a_failed_trace_puts_back_what_it_moved() -> None:
    box, items, memory = Box(h=torch.ones(2, device="jax")), [torch.zeros(2, device="jax")], {}
    held = box.h, items[0]

    @torchax_core.jit
    def step(x):
        box.h = box.h + x
        items.append(x * 2)
        items[0] = x
        memory["new"] = x + 1
        raise KeyError("no")

    with pytest.raises(KeyError):
        step(torch.ones(2, device="jax"))
    assert box.h is held[0] and items[0] is held[1] and len(items) == 1 and not memory


def test_transformations_around_and_inside() -> None:
    weight = torch.tensor([1.0, 2.0], device="jax")
    jitted = torchax_core.jit(lambda x: (x * weight).sin().sum())
    function = torchax_core.interop.jax_view(jitted)
    x = jax.numpy.array([0.5, 1.5])
    want = weight.jax() * jax.numpy.cos(weight.jax() * x)
    for derivative in (jax.grad(function), jax.jit(jax.grad(function)), jax.grad(jax.jit(function))):
        assert jax.numpy.allclose(derivative(x), want)
    rows = jax.vmap(function)(jax.numpy.stack([x, 2 * x]))
    assert jax.numpy.allclose(rows, jax.numpy.array([function(x), function(2 * x)]))
    total, _ = jax.lax.scan(lambda c, r: (c + function(r), None), 0.0, jax.numpy.stack([x, 2 * x]))
    assert jax.numpy.allclose(total, rows.sum())

    def inside(x):
        values = torchax_core.interop.call_jax(jax.vmap(lambda a: jax.numpy.sin(a) * 2), x)
        loops = torchax_core.interop.fori_loop(0, 3, lambda i, c: c * weight, values)
        return torch.func.grad(lambda x: (x * weight).sum())(x) + torch.func.vmap(lambda x: x * 2)(loops)

    x = torch.ones(2, device="jax")
    torch.testing.assert_close(torchax_core.jit(inside)(x).cpu(), inside(x).cpu())


def test_what_programs_of_two_functions_share() -> None:
    """One puts new tensors in a place at each call, another reads it: it is compiled until that is known, and no more."""
    box = Box(h=torch.zeros(2, device="jax"))
    write = torchax_core.jit(lambda x: setattr(box, "h", box.h + x))
    read = torchax_core.jit(lambda x: box.h * x)
    two = torch.full((2,), 2.0, device="jax")
    for number in range(1, 6):
        write(two)
        assert read(two).tolist() == [4 * number] * 2
    assert len(write.compilations) == 1 and len(read.compilations) <= 3, read.explain()
    box.h = torch.ones(2, device="jax")
    assert read(two).tolist() == [2, 2]
    box.h = torch.ones(2, dtype=torch.int64, device="jax")
    assert read(two).tolist() == [2, 2] and len(read.compilations) <= 4


def test_python_numbers_and_tensors_elsewhere_are_warned_of() -> None:
    box = Box(calls=0, total=torch.zeros(()))

    def count(x):
        box.calls += 1
        return x + 1

    with pytest.warns(UserWarning, match="changed calls from 0 to 1 while the function was traced"):
        torchax_core.jit(count)(torch.ones(2, device="jax"))

    def add(x):
        box.total.add_(1)
        return x + 1

    run = torchax_core.jit(add)
    with pytest.warns(UserWarning, match="wrote to a tensor on cpu of shape"):
        run(torch.ones(2, device="jax"))
    run(torch.ones(2, device="jax"))
    assert box.total == 2


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_caches_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
    config = transformers.LlamaConfig(**sizes)
    on_cpu = transformers.LlamaForCausalLM(config).eval()
    model = copy.deepcopy(on_cpu).to("jax")
    tokens = torch.tensor([[3, 5, 7]], device="jax")
    step = torchax_core.jit(lambda ids, cache: model(input_ids=ids, past_key_values=cache, use_cache=True))
    with torch.no_grad():
        want = on_cpu(input_ids=tokens.cpu()).logits[0]
        cache, given = transformers.DynamicCache(config=config), None
        for i in range(3):
            token = tokens[:, i : i + 1]
            out = step(token, cache)
            assert out.past_key_values is cache and cache.get_seq_length() == i + 1
            torch.testing.assert_close(out.logits[0, -1].cpu(), want[i], rtol=1e-4, atol=1e-5)
            given = step(token, given.past_key_values if given else transformers.DynamicCache(config=config))
            torch.testing.assert_close(given.logits[0, -1].cpu(), want[i], rtol=1e-4, atol=1e-5)
        fresh = torchax_core.jit(lambda ids: model(input_ids=ids, use_cache=True).past_key_values)
        first, second = fresh(tokens), fresh(tokens + 1)
    assert first is not second and not torch.equal(first.layers[0].keys.cpu(), second.layers[0].keys.cpu())
    assert len(step.compilations) <= 4, step.explain()


# -- state by ways that nobody watches -------------------------------------------------------------------------------------


class Meta(type):
    w: torch.Tensor


class WithMeta(metaclass=Meta):
    pass


ONE = pair("jax", 1)


def _defaults() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    def scaled(x, w=ONE):
        return x * w

    return scaled, lambda w: setattr(scaled, "__defaults__", (w,))


def _keyword_defaults() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    def scaled(x, *, w=ONE):
        return x * w

    return lambda x: scaled(x), lambda w: setattr(scaled, "__kwdefaults__", {"w": w})


def _partial() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    held = [functools.partial(torch.mul, pair("jax", 1))]
    return lambda x: held[0](x), lambda w: held.__setitem__(0, functools.partial(torch.mul, w))


def _context() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    held: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("held")
    held.set(pair("jax", 1))
    return lambda x: x * held.get(), held.set


def _weakly_held() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    owner = Box(w=pair("jax", 1))
    reference = weakref.ref(owner)
    return lambda x: x * reference().w, lambda w: setattr(owner, "w", w)


def _generator() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    def generate():
        w = pair("jax", 1)
        while True:
            given = yield w
            w = w if given is None else given

    values = generate()
    next(values)
    return lambda x: x * next(values), values.send


def _state_of_an_optimizer() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    parameter = nn.Parameter(pair("jax", 1))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["w"] = pair("jax", 1)
    return lambda x: x * optimizer.state[parameter]["w"], lambda w: optimizer.state[parameter].update(w=w)


def _metaclass() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    Meta.w = pair("jax", 1)
    return lambda x: x * WithMeta.w, lambda w: setattr(Meta, "w", w)


def _imported_inside() -> tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]:
    module = sys.modules["torchax_test_state"] = types.ModuleType("torchax_test_state")
    module.w = pair("jax", 1)

    def scaled(x):
        import torchax_test_state

        return x * torchax_test_state.w

    return scaled, lambda w: setattr(module, "w", w)


HIDDEN = [
    *(_defaults, _keyword_defaults, _partial, _context, _weakly_held, _generator),
    *(_state_of_an_optimizer, _metaclass, _imported_inside),
]


@pytest.mark.parametrize("make", HIDDEN, ids=lambda make: make.__name__)
def test_state_replaced_where_nobody_looks(make) -> None:
    """A state tensor that nobody but the program holds any more is not what the function would find."""
    function, put = make()
    run = torchax_core.jit(function)
    for value in (1, 2, 2, 3):
        put(pair("jax", value))
        assert run(pair("jax", 5)).tolist() == [5 * value] * 2
    before = len(run.compilations)
    run(pair("jax", 5))
    assert len(run.compilations) == before


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(2)
        self.scale, self.shift, self.mode, self.steps = 1.0, False, "plain", 0
        self.options = {"power": 1}

    def forward(self, x):
        out = self.norm(self.dropout(x)) * self.scale ** self.options["power"]
        out = out.abs() if self.mode == "positive" else out
        return out + 1 if self.shift else out


@pytest.mark.parametrize(
    "change",
    {
        "torch's settings": lambda m: (
            setattr(m.dropout, "p", 1.0),
            setattr(m.norm, "bias", nn.Parameter(m.norm.bias + 1)),
        ),
        "eps": lambda m: setattr(m.norm, "eps", 10.0),
        "float": lambda m: setattr(m, "scale", 2.0),
        "integer for a float": lambda m: setattr(m, "scale", 3),
        "bool": lambda m: setattr(m, "shift", True),
        "string": lambda m: setattr(m, "mode", "positive"),
        "in a dict": lambda m: (setattr(m, "scale", 2.0), m.options.update(power=3)),
    }.values(),
)
def test_settings_changed_between_calls(change) -> None:
    seen = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        model = Settings().to(device)
        run = torchax_core.jit(model) if device == "jax" else model
        x = torch.tensor([[1.0, 2.0], [5.0, -3.0]], device=device)
        results = [run(x).tolist()]
        change(model)
        seen.append([*results, run(x).tolist(), run(x).tolist()])
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]))


def test_a_number_that_makes_no_difference_is_looked_at_once() -> None:
    model = Settings().to("jax")
    run = torchax_core.jit(model)
    x = torch.ones(1, 2, device="jax")
    for _ in range(5):
        model.steps += 1
        run(x)
    assert len(run.compilations) == 2, run.explain()
    model.shift = True
    assert torch.equal(run(x).cpu(), model(x).cpu())


def test_a_function_that_is_traced_again_and_again_says_so() -> None:
    settings = {"rate": 0.0}
    run = torchax_core.jit(lambda x: x * settings["rate"])
    x = pair("jax", 1)
    with pytest.warns(UserWarning, match=r"traced 32 times .* \['rate'\] was [\d.]+, and is 31.0 now.*explain"):
        for i in range(32):
            settings["rate"] = float(i)
            assert run(x).tolist() == [i, i]


def _followed_training(change: Callable[[Any, Any, int], None]) -> list[list[float]]:
    seen = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = torchax_core.jit(step) if device == "jax" else step
        x = torch.linspace(0, 1, 6).reshape(2, 3).to(device)
        losses = []
        for number in range(5):
            losses.append(run(x).item())
            change(model, optimizer, number)
        seen.append(losses)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-6)
    return seen


def test_a_group_of_parameters_added_between_calls() -> None:
    def change(model, optimizer, number):
        if number == 1:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})

    _followed_training(change)


def test_weights_pruned_between_calls() -> None:
    """Pruning moves a weight to another name, and a hook puts a product of it in its place at each call."""

    def change(model, optimizer, number):
        if number == 1:
            prune.l1_unstructured(model[2], "weight", amount=0.5)
        if number == 2:
            assert model[2].weight.tolist()
        if number == 3:
            prune.remove(model[2], "weight")

    _followed_training(change)


def test_containers_made_anew_hold_state_and_results():
    norm = torch.nn.BatchNorm1d(4).to("jax")
    holder = torch.nn.Module()

    @torchax_core.jit
    def step(x):
        holder.buffers_by_name = dict(norm.named_buffers())
        holder.nested = {"a": [x * 2, {"b": x * 3}], "w": norm.weight}
        return norm(x)

    for _ in range(4):
        x = torch.randn(3, 4)
        step(x.to("jax"))
        assert holder.buffers_by_name["running_mean"] is norm.running_mean
        assert holder.nested["w"] is norm.weight
        torch.testing.assert_close(holder.nested["a"][1]["b"].cpu(), x * 3)
    assert len(str(step.explain()).splitlines()) <= 2

"""torch.compile(backend="torchax"): what the compiled function computes, against eager torch on the CPU."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

import torchax_core
from torchax_core import Config, Environment, log
from torchax_core.errors import AccuracyError, DataDependentError, NonFiniteError
from torchax_core.interop import call_torch


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles anew, and leaves nothing compiled behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, **options):
    return torch.compile(fn, backend="torchax", **options)


def close(ours: torch.Tensor, cpu: torch.Tensor, **tolerances) -> None:
    assert ours.device.type == "jax"
    torch.testing.assert_close(ours.cpu(), cpu, **tolerances)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_inference() -> None:
    model = network().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        wanted = model(x)
        run = compiled(copy.deepcopy(model).to("jax"), fullgraph=True)
        close(run(x.to("jax")), wanted)


def test_training_step_with_buffers() -> None:
    cpu = network()
    ours = copy.deepcopy(cpu).to("jax")
    run = compiled(ours, fullgraph=True)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        for p in [*cpu.parameters(), *ours.parameters()]:
            p.grad = None
        wanted = cpu(x)
        wanted.square().sum().backward()
        result = run(x.to("jax"))
        result.square().sum().backward()
        close(result, wanted)
        for name, parameter in cpu.named_parameters():
            close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    for name, buffer in cpu.named_buffers():
        close(ours.get_buffer(name), buffer)


def test_graph_break_on_a_value() -> None:
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y.exp()
        return y - 1

    for x in (torch.ones(3), -torch.ones(3)):
        close(compiled(f)(x.to("jax")), f(x))


def test_fullgraph_names_the_line_of_a_value() -> None:
    def f(x):
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)Data-dependent.*x \* 2 if x.sum"):
        compiled(f, fullgraph=True)(torch.ones(3, device="jax"))


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_other_shapes(dynamic) -> None:
    def f(x):
        return (x.reshape(-1) * x.shape[0]).sum() + x.new_zeros(x.shape).t()

    run = compiled(f, dynamic=dynamic)
    for n in (2, 3, 5, 3):
        x = torch.randn(n, 4)
        close(run(x.to("jax")), f(x))


def test_marked_dynamic_dim_traces_once() -> None:
    def f(x):
        return x.softmax(-1) @ x.t()

    run = compiled(f, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for n in (2, 3, 7):
        x = torch.randn(n, 4)
        ours = x.to("jax")
        torch._dynamo.mark_dynamic(ours, 0)
        close(run(ours), f(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_inputs_are_written() -> None:
    def f(x, y):
        x.add_(1)
        y[0] = 5
        x.t().mul_(2)
        return x + y

    x, y = torch.randn(2, 2), torch.randn(2, 2)
    a, b = x.to("jax"), y.to("jax")
    wanted = f(x, y)
    close(compiled(f, fullgraph=True)(a, b), wanted)
    close(a, x)
    close(b, y)


def test_an_input_is_written_while_training() -> None:
    def f(x, w, state):
        state.mul_(0.5).add_(x.detach().sum())
        return (x * w).sum() * state

    def run(fn, device):
        torch.manual_seed(0)
        x = torch.randn(3).to(device)
        w = torch.randn(3).to(device).requires_grad_()
        state = torch.ones(()).to(device)
        fn(x, w, state).backward()
        return w.grad, state

    for ours, wanted in zip(run(compiled(f, fullgraph=True), "jax"), run(f, "cpu"), strict=True):
        close(ours.detach(), wanted.detach())


def test_arguments_that_share_memory_and_are_written() -> None:
    def f(x, y):
        x.add_(1)
        return y * 2

    x = torch.arange(6.0).reshape(2, 3)
    a = x.to("jax")
    wanted = f(x, x[1])
    with pytest.warns(UserWarning, match="share memory"):
        close(compiled(f)(a, a[1]), wanted)
    close(a, x)


def overlapping_leaves(compile, device):
    base = torch.arange(6.0).to(device)
    a, b = base[:4].detach().requires_grad_(), base[2:].detach().requires_grad_()
    compile(lambda a, b: (a.sin() * 2).sum() + (b * b).sum())(a, b).backward()
    return a.grad, b.grad


def three_written(compile, device):
    def f(x, y, z):
        y.mul_(3)
        z.add_(1)
        x.sub_(2)
        return x * 2 + y.sum() + z.sum()

    x = torch.arange(6.0).to(device)
    y, z = x[2:5], x[::2]
    return compile(f)(x, y, z), x, y, z


def written_with_gradients(compile, device):
    def f(x, y):
        y.mul_(3)
        return (x * x).sum() + y.sum()

    w = torch.arange(6.0).to(device).requires_grad_()
    x = w * 2
    compile(f)(x, x[2:5]).backward()
    return w.grad, x.detach()


def buffers(compile, device):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("all", torch.zeros(6).to(device))
            self.register_buffer("some", self.all[2:4])

        def forward(self, x):
            self.some.add_(x)
            return self.all.sum() + self.all

    run = compile(Counting())
    x = torch.ones(2).to(device)
    return run(x), run(x)


@pytest.mark.filterwarnings("ignore:torch.compile. arguments share memory")
@pytest.mark.parametrize("case", [overlapping_leaves, three_written, written_with_gradients, buffers])
def test_arguments_over_one_memory(case) -> None:
    for ours, wanted in zip(case(compiled, "jax"), case(lambda f: f, "cpu"), strict=True):
        close(ours, wanted)


def test_gradients_of_gradients_are_torchs_error() -> None:
    x, w = (torch.randn(4, device="jax", requires_grad=True) for _ in range(2))

    def f(x, w):
        return (x * w).tanh().sum()

    def penalized(f):
        loss = f(x, w)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(loss + gradient.square().sum(), w)[0]

    run = compiled(f, fullgraph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalized(run)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(penalized(run), penalized(f))
    torch.testing.assert_close(torchax_core.jit(lambda: penalized(f))(), penalized(f))


def test_results_that_are_views_of_arguments_and_of_each_other() -> None:
    def f(x):
        y = x * 2
        return x.t(), y, y[0]

    x = torch.randn(2, 3)
    a = x.to("jax")
    turned, y, row = compiled(f, fullgraph=True)(a)
    turned.add_(1)
    close(a, x + 1)
    row.zero_()
    assert y[0].abs().sum() == 0


def test_views_as_arguments() -> None:
    def f(x):
        return x.view(-1) if x.is_contiguous() else x.reshape(-1) + 100

    base = torch.randn(4, 6)
    ours = base.to("jax")
    run = compiled(f)
    for view in (lambda t: t[1:3], lambda t: t.t(), lambda t: t[:, ::2]):
        close(run(view(ours)), f(view(base)))


def test_views_as_arguments_are_written() -> None:
    def f(x):
        x.mul_(3)
        return x.sum()

    base = torch.randn(4, 6)
    ours = base.to("jax")
    close(compiled(f)(ours[1:, ::2]), f(base[1:, ::2]))
    close(ours, base)


def test_dropout_differs_from_call_to_call_and_repeats_from_the_seed() -> None:
    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x)

    run = compiled(f, fullgraph=True)
    x = torch.ones(100, device="jax")
    torch.manual_seed(1)
    first, second = run(x), run(x)
    torch.manual_seed(1)
    again = run(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_dropout_backward_uses_the_mask_of_the_forward() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5), fullgraph=True)
    x = torch.ones(1000, device="jax", requires_grad=True)
    y = run(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert 300 < (y == 0).sum().item() < 700


def test_constants_made_in_the_function() -> None:
    def f(x):
        table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return x * table + torch.arange(3, device=x.device) + torch.ones(3, device=x.device)

    x = torch.randn(2, 3)
    close(compiled(f, fullgraph=True)(x.to("jax")), f(x))


def test_custom_autograd_function_keeps_its_backward() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad * 7

    def f(x):
        return (Straight.apply(x) * 3 + x.detach() * 100).sum()

    x = torch.randn(4, device="jax", requires_grad=True)
    compiled(f, fullgraph=True)(x).backward()
    close(x.grad, torch.full((4,), 21.0))


def test_no_grad_inside() -> None:
    def f(x):
        with torch.no_grad():
            scale = x.abs().max()
        return (x / scale).sum()

    x = torch.randn(4)
    a = x.to("jax").requires_grad_()
    b = x.clone().requires_grad_()
    compiled(f, fullgraph=True)(a).backward()
    f(b).backward()
    close(a.grad, b.grad)


def test_autocast() -> None:
    model = nn.Linear(4, 4).to("jax")
    x = torch.randn(2, 4, device="jax")

    def f(x):
        with torch.autocast("jax", dtype=torch.bfloat16):
            return model(x)

    result = compiled(f, fullgraph=True)(x)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, f(x))


def test_second_backward_without_retain_is_torchs_error() -> None:
    x = torch.ones(3, device="jax", requires_grad=True)
    y = compiled(lambda x: (x * x).exp().sum())(x)
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_hooks_on_saved_tensors_see_each_of_them() -> None:
    def f(x):
        return ((x @ x).sin() @ x).exp().sum()

    def gradient(fn, x, *hooks):
        with torch.autograd.graph.saved_tensors_hooks(*hooks) if hooks else torch.enable_grad():
            y = fn(x)
        return torch.autograd.grad(y, x)[0]

    packed = []
    run = compiled(f, fullgraph=True)
    x = (0.1 * torch.randn(3, 3)).requires_grad_()
    ours = x.detach().to("jax").requires_grad_()
    wanted = gradient(f, x)
    for _ in range(2):  # what is saved is handed over in one piece, unless somebody looks
        close(gradient(run, ours), wanted)
        close(gradient(run, ours, lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to("jax")), wanted)
    assert {tuple(shape) for shape in packed} <= {(3, 3), ()} and len(packed) >= 4


def test_what_is_saved_for_the_backward_is_taken_by_nothing_else() -> None:
    x = torch.randn(3, 3, device="jax", requires_grad=True)
    y = compiled(lambda x: (x @ x).exp().sum(), fullgraph=True)(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not x]
    with pytest.raises(RuntimeError, match="saved for its backward"):
        saved[0] + 1


def test_gradients_of_two_results() -> None:
    def f(x):
        return x.sin(), (x * x).sum()

    def run(fn, x):
        a, b = fn(x)
        a.sum().backward(retain_graph=True)
        b.backward()
        return x.grad

    x = torch.randn(3)
    ours = run(compiled(f), x.to("jax").requires_grad_())
    close(ours, run(f, x.clone().requires_grad_()))


def test_results_in_another_memory_order() -> None:
    def f(x):
        return x.t() * 2

    run = compiled(f, fullgraph=True)
    x, weight = torch.randn(3, 4), torch.randn(4, 3)
    a, b = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    ours, wanted = run(a), f(b)
    assert ours.stride() == wanted.stride()
    (ours * weight.to("jax")).sum().backward()
    (wanted * weight).sum().backward()
    close(a.grad, b.grad)


def test_as_strided_of_arguments() -> None:
    run = compiled(lambda x: x.as_strided((2, 2), (1, 2)), fullgraph=True)
    x = torch.arange(12.0).reshape(3, 4)
    ours = x.to("jax")
    close(run(ours), x.as_strided((2, 2), (1, 2)))
    close(run(ours.t()), x.t().as_strided((2, 2), (1, 2)))
    with pytest.raises(RuntimeError, match="view with gaps"):
        run(ours[:, 1::2])


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    cpu = Tied()
    ours = copy.deepcopy(cpu).to("jax")
    ids = torch.tensor([1, 2, 3])
    cpu(ids).logsumexp(-1).sum().backward()
    compiled(ours, fullgraph=True)(ids.to("jax")).logsumexp(-1).sum().backward()
    close(ours.head.weight.grad, cpu.head.weight.grad)


def test_changed_weights_are_seen() -> None:
    model = nn.Linear(3, 2).to("jax").eval()
    run = compiled(model)
    x = torch.randn(1, 3, device="jax")
    with torch.no_grad():
        before = run(x)
        model.weight.data = torch.zeros(2, 3, device="jax")
        model.bias.add_(1)
        after = run(x)
        assert not torch.equal(before, after)
        assert torch.equal(after[0], model.bias)
        model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
        torch.testing.assert_close(run(x), x.sum().expand(1, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-2),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
    ],
    ids=["SGD", "AdamW", "RMSprop", "Adagrad"],
)
def test_compiled_optimizer_step(make) -> None:
    def train(device: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        step = optimizer.step if device == "cpu" else compiled(lambda: optimizer.step())
        for seed in range(5):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1, 2]).to(device)).backward()
            step()
            schedule.step()
        return model

    ours = train("jax")
    for name, parameter in train("cpu").named_parameters():
        close(ours.get_parameter(name).detach(), parameter.detach(), rtol=1e-5, atol=1e-6)


# -- tensors that live on the CPU ----------------------------------------------------------------


def test_cpu_model_trains_on_the_device_and_results_come_back() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = compiled(model, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        losses = []
        for fn, optimizer in zip((eager, run), optimizers, strict=True):
            optimizer.zero_grad()
            loss = fn(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert losses[1].device.type == "cpu"
        torch.testing.assert_close(losses[1], losses[0])
    for (name, ours), wanted in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        assert ours.device.type == "cpu", name
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_cpu_result_that_the_backward_needs() -> None:
    x = torch.rand(3).requires_grad_()
    result = compiled(torch.sqrt, fullgraph=True)(x)
    torch.testing.assert_close(result, x.sqrt())
    result.sum().backward()
    torch.testing.assert_close(x.grad, 0.5 / x.detach().sqrt())


@torch.no_grad()
def test_cpu_weights_are_kept_in_step() -> None:
    model = nn.Linear(3, 2).eval()
    run = compiled(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(x), model(x))
    model.weight.mul_(2)
    torch.testing.assert_close(run(x), model(x))
    model.weight.data.add_(1)  # without a new version
    torch.testing.assert_close(run(x), model(x))
    model.bias.numpy()[:] = 7  # behind torch's back
    torch.testing.assert_close(run(x), model(x))
    model.weight.data = torch.zeros(2, 3)
    torch.testing.assert_close(run(x), torch.full((4, 2), 7.0))


def test_cpu_inputs_are_written_and_views_alias() -> None:
    def f(x, y):
        x.add_(1)
        y[1].zero_()
        z = x + y
        return z, z[0], x.t()

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    a, b = x.clone(), y.clone()
    results = compiled(f, fullgraph=True)(a, b)
    for ours, wanted in zip((*results, a, b), (*f(x, y), x, y), strict=True):
        torch.testing.assert_close(ours, wanted)
    results[1].zero_()
    assert results[0][0].abs().sum() == 0
    results[2].zero_()
    assert a.abs().sum() == 0


def test_result_does_not_change_with_a_cpu_argument() -> None:
    run = compiled(lambda x, y: (x, x.view(-1), y + 1))
    x = torch.ones(3)
    results = run(x, torch.zeros(3))
    x.zero_()
    assert results[0] is x
    assert results[1].sum() == 0
    assert results[2].sum() == 3


def test_backward_after_the_weights_changed_is_torchs_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    y = compiled(model)(torch.randn(2, 3)).sum()
    with torch.no_grad():
        model[1].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_moves_inside_the_function() -> None:
    def f(x):
        return (x.to("jax") * 2).cpu() + torch.ones(3), x.to("jax")

    x = torch.randn(3)
    result, moved = compiled(f, fullgraph=True)(x)
    torch.testing.assert_close(result, x * 2 + 1)
    close(moved, x)


# -- definitions ---------------------------------------------------------------------------------


def test_override_changes_what_a_compiled_function_computes() -> None:
    env = torchax_core.current_env()
    run = compiled(lambda x: x.exp() + 1, fullgraph=True)
    x = torch.ones(3, device="jax", requires_grad=True)
    before = run(x)
    with env.override_op_definition("aten::exp", lambda self: self * 100, is_jax_function=True):
        close(run(x).detach(), torch.full((3,), 101.0))
    assert torch.equal(run(x), before)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_override_of_a_composite_op_with_gradients() -> None:
    def mine(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.shape[-1] == 8:
            return NotImplemented
        return jnp.sin(query) * key + value

    env = torchax_core.current_env()
    run = compiled(attention, fullgraph=True)
    q, k, v = (torch.randn(1, 2, 4, 4, device="jax", requires_grad=True) for _ in range(3))
    wide = torch.randn(1, 2, 4, 8, device="jax")
    run(q, k, v)
    with env.override_op_definition("aten::scaled_dot_product_attention", mine, is_jax_function=True):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                close(run(q, k, v).detach(), (q.cpu().sin() * k.cpu() + v.cpu()).detach())
        run(q, k, v).sum().backward()
        close(q.grad, (q.cpu().cos() * k.cpu()).detach())
        close(run(wide, wide, wide), attention(wide.cpu(), wide.cpu(), wide.cpu()))
    close(run(q, k, v).detach(), attention(q.cpu(), k.cpu(), v.cpu()).detach())


def graphs_of(fn, *args) -> list[str]:
    """The names of the ops in the graphs that fn's forward and backward become."""
    from torchax_core import dynamo

    found: list[str] = []
    original = dynamo.GraphProgram.__init__

    def spying(self, graph, name, returned=None):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        original(self, graph, name, returned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo.GraphProgram, "__init__", spying)
        compiled(fn)(*args).sum().backward()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_stays_whole_with_gradients_like_torchs(dtype) -> None:
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=dtype) for _ in range(3))
    ours = [t.to("jax").requires_grad_() for t in (q, k, v)]
    cpu = [t.requires_grad_() for t in (q, k, v)]
    ops = graphs_of(attention, *ours)
    assert "torchax.whole.default" in ops
    assert "torchax.whole_backward.default" in ops
    assert not any("softmax" in op for op in ops)
    attention(*cpu).sum().backward()
    for a, b in zip(ours, cpu, strict=True):
        close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_attention_with_dropout_repeats_in_its_backward() -> None:
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    q, k = (torch.randn(1, 1, 16, 4, device="jax") for _ in range(2))
    v = torch.randn(1, 1, 16, 4, device="jax", requires_grad=True)
    run = compiled(f, fullgraph=True)
    torch.manual_seed(3)
    first = run(q, k, v)
    first.sum().backward()
    # linear in v, so that the gradient of the sum, times v, is the sum again, if the mask was the same
    torch.testing.assert_close((v.grad * v).sum().detach(), first.sum().detach(), rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(q, k, v), first)
    torch.manual_seed(3)
    assert torch.equal(run(q, k, v), first)


def test_override_of_a_torch_function() -> None:
    env = torchax_core.current_env()

    def f(x):
        return F.hardswish(x) * 3

    run = compiled(f, fullgraph=True)
    x = torch.randn(4, device="jax", requires_grad=True)
    close(run(x).detach(), f(x.cpu()).detach())
    name = "torch.nn.functional.hardswish"
    with env.override_op_definition(name, lambda input, inplace=False: jnp.sin(input), is_jax_function=True):
        result = run(x)
        result.sum().backward()
        close(result.detach(), (x.cpu().sin() * 3).detach())
        close(x.grad, (x.cpu().cos() * 3).detach())
    with env.override_op_definition(name, lambda input, inplace=False: torch.cos(input)):
        close(run(x).detach(), (x.cpu().cos() * 3).detach())
    with env.override_op_definition(name, lambda input, inplace=False: NotImplemented, is_jax_function=True):
        close(run(x).detach(), f(x.cpu()).detach())
    close(run(x).detach(), f(x.cpu()).detach())


# -- names, and debug checks ---------------------------------------------------------------------


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3), nn.GELU())])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x - 100).sqrt()  # NaN


def programs_of(fn, *args) -> dict[str, str]:
    """The programs that fn's forward and backward become, as StableHLO with locations."""
    from torchax_core import graph_program

    found: dict[str, str] = {}
    original = graph_program._Program.run

    def spying(self, inputs):
        key = jax.random.key(0)
        with jax.enable_x64(True):
            lowered = self.compiled.lower(key, jnp.uint32(0), *self._arrays(inputs))
        found["backward" if found else "forward"] = lowered.as_text(debug_info=True)
        return original(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_program._Program, "run", spying)
        compiled(fn)(*args).sum().backward()
    return found


def test_programs_carry_the_names_of_modules() -> None:
    model = Rooted().to("jax")
    found = programs_of(lambda x: model(x) * 2, torch.randn(2, 3, device="jax"))
    assert "Rooted/layers.1/0/native_layer_norm/" in found["forward"]
    assert "Rooted/layers.0/" in found["forward"]
    assert "backward/Rooted/layers.1/1/gelu_backward/" in found["backward"]


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_debug_checks_name_the_op_and_the_line(device) -> None:
    model = Rooted().to(device)
    run = compiled(model)
    x = torch.randn(2, 3).to(device)
    zero = torch.zeros(3).to(device).requires_grad_()
    with Environment(Config(debug_nans=True)):
        with pytest.raises(
            NonFiniteError, match=r"aten::sqrt made NaN at .*test_dynamo.py:\d+: return \(x - 100\).sqrt"
        ):
            run(x)
        with pytest.raises(NonFiniteError, match=r"in backward \(SqrtBackward0, of aten::sqrt at .*test_dynamo.py"):
            (compiled(lambda x: x.sqrt() * 0)(zero)).sum().backward()
    with Environment(Config(debug_accuracy="raise")) as env:
        assert run(x).isnan().all() and run(x).device.type == device
        env.override_op_definition("aten::gelu", lambda self, approximate="none": self * 2, is_jax_function=True)
        with pytest.raises(AccuracyError, match="aten::gelu differs from CPU torch at .*test_dynamo.py"):
            run(x)
    assert run(x).isnan().all()  # compiled again, nothing is looked at


def test_debug_checks_leave_writes_to_cpu_tensors() -> None:
    def f(x, state):
        state.add_(x.sum())
        return state * torch.ones(3), state

    x, state = torch.ones(3), torch.zeros(3)
    with Environment(Config(debug_nans=True)):
        product, same = compiled(f)(x, state)
    assert same is state
    torch.testing.assert_close(state, torch.full((3,), 3.0))
    torch.testing.assert_close(product, state)


# -- being found ---------------------------------------------------------------------------------


def python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_backend_is_found_without_importing_anything_of_ours() -> None:
    code = """
import sys, torch
model = torch.nn.Linear(3, 2)
assert "torchax" in torch._dynamo.list_backends() and "torchax_core" not in sys.modules
run = torch.compile(model, backend="torchax")
x = torch.randn(4, 3)
torch.testing.assert_close(run(x), model(x))
assert "torchax_core.dynamo" in sys.modules
"""
    python(code)


def test_importing_the_core_does_not_import_dynamo() -> None:
    python("import sys, torchax_core; assert not {'torch._dynamo', 'torchax_core.dynamo'} & set(sys.modules)")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(Exception, match="takes no 'options'"):
        compiled(lambda x: x + 1, options={"max_autotune": True})(torch.ones(2, device="jax"))
    close(compiled(lambda x: x + 1, mode="reduce-overhead")(torch.ones(2, device="jax")), torch.full((2,), 2.0))


# -- models, and torchax_core.jit ----------------------------------------------------------------


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_model_forward_and_training_step(make) -> None:
    cpu = make().eval()  # no dropout, so that both compute the same
    ours = copy.deepcopy(cpu).to("jax")
    run = compiled(ours)
    ids = torch.randint(0, 48, (2, 10))
    with torch.no_grad():
        close(run(ids.to("jax")).logits, cpu(ids).logits, rtol=1e-4, atol=1e-5)
    losses = []
    for model, fn, device in ((cpu, cpu, "cpu"), (ours, run, "jax")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = fn(ids.to(device), labels=ids.to(device)).loss
            loss.backward()
            optimizer.step()
        losses.append(fn(ids.to(device), labels=ids.to(device)).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_compiled_module_in_a_jitted_step() -> None:
    def train(device: str, jitted: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
        fn = compiled(model) if jitted else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = fn(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        run = torchax_core.jit(step) if jitted else step
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device)
        return [run(x).item() for _ in range(4)]

    assert train("jax", True) == pytest.approx(train("cpu", False), rel=1e-5)


def test_compiled_function_takes_numbers_read_from_tensors() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        x = torch.randn(3)
        run = compiled(lambda x: x * x.sum().item() + 1, fullgraph=True)
        close(run(x.to("jax")), x * x.sum() + 1)


def test_shapes_that_depend_on_data() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    close(compiled(lambda x: x.nonzero() * 2)(x.to("jax")), x.nonzero() * 2)  # a graph break
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        with pytest.raises(DataDependentError, match="nonzero"):
            compiled(lambda x: x.nonzero() * 2, fullgraph=True)(x.to("jax"))
        with pytest.raises(DataDependentError, match="shape"):
            compiled(lambda x: x.new_zeros(x.argmax().item()), fullgraph=True)(x.to("jax"))


def test_compiled_module_inside_a_jax_transformation() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to("jax")
    run = compiled(model)
    x = torch.randn(2, 3, device="jax")
    run(x)
    ours = jax.grad(lambda a: call_torch(lambda t: run(t).square().sum(), a))(x.jax())
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    torch.testing.assert_close(torchax_core.tensor(ours), leaf.grad)


def test_cpu_arguments_that_share_memory_and_are_written() -> None:
    def f(x, y):
        x.add_(1)
        return y * 2

    x = torch.arange(6.0).reshape(2, 3)
    a = x.clone()
    wanted = f(x, x[1])
    torch.testing.assert_close(compiled(f)(a, a[1]), wanted)
    torch.testing.assert_close(a, x)


def test_donated_state_is_kept_where_it_is_needed() -> None:
    run = compiled(lambda x: x.add_(1).sum())
    x = torch.zeros(3, device="jax")
    before = x.jax()
    run(x)
    run(x)
    assert before.sum() == 0
    close(x, torch.full((3,), 2.0))


# -- control flow ------------------------------------------------------------------------------


def by_sign(x):
    return torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos() * 2,), (x,))[0]


def running_sum(x):
    return scan(lambda carry, row: (carry + row, carry * row), x[0], x)


def each_row(x):
    return torch_map(lambda row, scale: row.softmax(0) * scale, x, x.sum())


def doubled_until_large(x):
    return while_loop(lambda i, a: a.abs().sum() < 100, lambda i, a: (i + 1, a * 2), (torch.zeros_like(x[0, 0]), x))


def gradients(fn, x):
    x = x.requires_grad_()
    results = pytree.tree_leaves(fn(x))
    sum(r.sum() for r in results).backward()
    return [*(r.detach() for r in results), x.grad]


@pytest.mark.parametrize("fn", [by_sign, running_sum, each_row])
def test_compiled_with_gradients(fn) -> None:
    run = torch.compile(fn, backend="torchax", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    inputs = [torch.rand(3, 4), -torch.rand(3, 4)]
    ours = [gradients(run, x.to("jax")) for x in inputs]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # the value decides when it runs
    for results, x in zip(ours, inputs, strict=True):
        for result, wanted in zip(results, gradients(fn, x.clone()), strict=True):
            torch.testing.assert_close(result.cpu(), wanted)


def test_compiled_while_loop() -> None:
    run = torch.compile(doubled_until_large, backend="torchax", fullgraph=True)
    for scale in (1, 20):
        x = scale * torch.rand(3, 4)
        for ours, wanted in zip(run(x.to("jax")), doubled_until_large(x), strict=True):
            torch.testing.assert_close(ours.cpu(), wanted)


def test_random_numbers_in_a_loop_are_refused() -> None:
    def f(x):
        return scan(lambda carry, row: (carry + torch.rand_like(row), row.clone()), x[0], x)

    with pytest.raises(Exception, match="draws random numbers"):
        torch.compile(f, backend="torchax", fullgraph=True)(torch.rand(3, 4, device="jax"))


def test_compiled_calls_are_logged(monkeypatch, caplog) -> None:
    monkeypatch.setattr(log, "ops", True)
    caplog.set_level(logging.INFO, logger=log.logger.name)
    model = network().to("jax")
    with Environment():
        run, x = compiled(model), torch.ones(3, 4, device="jax")
        for _ in range(2):
            run(x).sum().backward()
    lines = [record.getMessage() for record in caplog.records if "torch.compile(" in record.getMessage()]
    kinds = [re.sub(r"\d+ tensors|[\d.]+ (us|ms)", "_", line) for line in lines]
    first, hit = "compiled 1 program in _", "hit"
    assert (
        re.sub(r"compiled \d+ programs?", "compiled 1 program", kinds[0])
        == f"torch.compile(forward)(_) -> _  _, {first}"
    )
    assert kinds[2:] == [f"torch.compile({name})(_) -> _  _, {hit}" for name in ("forward", "backward")]


def test_dynamo_looks_at_nothing_beneath_an_op():
    """In a frame that dynamo leaves alone, it is asked about every frame called from there."""
    seen = []

    def look(x):  # of nobody's package: not skipped for its file
        seen.append(torch.compiler.is_compiling())
        return x

    def relu(self):
        return jnp.maximum(look(self), 0)

    @torch._dynamo.decorators.skip
    def run(x, layer):
        return layer(x).relu()

    layer, x = torch.nn.Linear(3, 2).to("jax"), torch.ones(4, 3, device="jax")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torchax_core.current_env().override_op_definition("aten::relu", relu, is_jax_function=True):
        torch.compile(run, backend="torchax")(x, layer).sum().backward()
    assert not any(seen) and seen and layer.weight.grad is not None
    assert "look" not in str(torch._dynamo.utils.counters) and torch._dynamo.utils.counters["frames"]["total"] == 0


def test_ops_that_end_with_a_check_of_their_success():
    """AOTAutograd keeps these checks in order by tokens."""

    def run(x):
        system = x @ x.T + torch.eye(4, device=x.device)
        return torch.linalg.inv(system) + torch.linalg.cholesky(system) + torch.linalg.solve(
            system, x
        ), torch.linalg.eigvals(x).abs()

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, cpu = x.to("jax").requires_grad_(), x.requires_grad_()
    for found, expected in zip(compiled(run, fullgraph=True)(ours), run(cpu), strict=True):
        torch.testing.assert_close(found.detach().sum().cpu(), expected.detach().sum())
        found.sum().backward(retain_graph=True)
        expected.sum().backward(retain_graph=True)
    torch.testing.assert_close(ours.grad.cpu(), cpu.grad)


def test_gradients_that_the_forward_has_saved_as_they_are():
    def run(x, y, value):
        return torch.cat([x, y]).index_fill(0, torch.tensor([1, 1, 0], device=y.device), value)

    inputs = torch.ones(0), torch.ones(3, 2), torch.tensor(2.0)
    ours, cpu = ([t.to(device).requires_grad_() for t in inputs] for device in ("jax", "cpu"))
    found, expected = compiled(run)(*ours), run(*cpu)
    close(found, expected)
    for a, b in zip(torch.autograd.grad(found.sum(), ours), torch.autograd.grad(expected.sum(), cpu), strict=True):
        close(a, b)


def test_gradients_of_complex_ops_left_whole():
    """Torch's are the conjugates of JAX's."""

    def run(x):
        spectrum = torch.fft.rfft(x)
        return spectrum.imag * 2 + spectrum.real.square() + torch.fft.ifft(spectrum * (1 + 2j)).imag

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, cpu = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    found, expected = compiled(run)(ours), run(cpu)
    close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    close(ours.grad, cpu.grad)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_constants_made_on_the_cpu(device):
    def run(x):
        elsewhere = torch.tensor([1.0, 2.0, 3.0])
        weight = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return x * weight + torch.signal.windows.hamming(3, device=x.device), elsewhere * 2

    ours, cpu = (torch.ones(2, 3, device=d, requires_grad=True) for d in (device, "cpu"))
    for found, expected in zip(compiled(run)(ours), run(cpu), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
    assert compiled(run)(ours)[1].device.type == "cpu"
    run(ours)[0].sum().backward()
    assert ours.grad.cpu().tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("op", [torch.linalg.svd, torch.linalg.eigh])
def test_gradients_of_complex_vectors_need_no_values(op):
    def loss(x):
        found = op(x @ x.mH + torch.diag(torch.arange(3.0, dtype=torch.float64, device=x.device)))
        return found[1].abs().square().cos().sum() + found[0].abs().sin().sum()

    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)
    ours, cpu = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    compiled(loss)(ours).backward()
    loss(cpu).backward()
    close(ours.grad, cpu.grad)

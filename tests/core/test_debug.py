"""debug.py: planted faults are found, and named by op and line; what is right is let pass."""

import re
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core import accuracy, debug, nonfinite, watching
from torchax_core.compat.config import Configuration
from torchax_core.errors import AccuracyError, AccuracyWarning, ConfigError, NonFiniteError


@pytest.fixture
def env():
    return torchax_core.default_env()


def randn(*shape, grad=False):
    return torch.randn(*shape, device="jax").requires_grad_(grad)


def line_of(marker):
    """The number of the line of this file that ends in `# marker`."""
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith("# " + marker))


# -- accuracy ----------------------------------------------------------------------------------------------------------


def test_a_training_step_of_right_ops_passes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.LayerNorm(8)
    ).to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.tensor([[1, 2], [3, 4]], device="jax")
    state = torch.get_rng_state()
    with debug.accuracy() as report:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    assert sum(report.compared.values()) > 30 and not report.differences
    assert {"aten::embedding", "aten::native_layer_norm_backward"} <= set(report.compared)
    assert any(reason == "random" for reason, _ in report.passed_over)
    assert "calls of" in str(report) and "random: " in str(report)


def test_a_wrong_override_is_named_with_line_inputs_and_error(env):
    x = torch.tensor([[0.5, 1.0, 2.0]], device="jax")
    with env.override_op_definition("aten::tanh", lambda self: jnp.tanh(self) * 1.01, is_jax_function=True):
        torch.tanh(x)  # nothing looks
        with debug.accuracy(), pytest.raises(AccuracyError) as caught:
            torch.tanh(x + 1)  # wrong override
        with debug.accuracy():
            torch.sin(x)
    text = str(caught.value)
    assert "aten::tanh differs from CPU torch" in text and "aten::tanh(float32[1,3])" in text
    assert f"test_debug.py:{line_of('wrong override')}: torch.tanh(x + 1)" in text
    assert "3 of 3 elements differ; largest error 0.00995" in text and "torchax explain aten::tanh" in text


def test_warnings_come_once_an_op_and_the_program_goes_on(env):
    x = randn(4)
    with env.override_op_definition("aten::exp", lambda self: self, is_jax_function=True):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with debug.accuracy("warn") as report:
                for _ in range(3):
                    y = torch.exp(x)
    assert [w.category for w in found] == [AccuracyWarning] and found[0].filename == __file__
    assert torch.equal(y.cpu(), x.cpu()) and report.compared["aten::exp"] == 3
    (difference,) = report.differences
    assert difference.op == "aten::exp" and difference.error > 100 * difference.tolerance


@pytest.mark.parametrize("write", ["view", "out", "self"])
def test_what_is_written_is_compared(env, write):
    """An in-place form follows from the functional op, and so does its fault; it shows in what was written."""
    base = randn(4, 4)
    with env.override_op_definition("aten::neg", lambda self: -self + 1e-3, is_jax_function=True), debug.accuracy():
        with pytest.raises(AccuracyError, match=r"aten::neg(_|\.out) differs"):
            if write == "view":
                base[1].neg_()
            elif write == "out":
                torch.neg(base, out=torch.empty(4, 4, device="jax"))
            else:
                base.neg_()


def test_a_write_through_a_view_that_misses_its_place_is_found(env):
    """The view holds what was written, and nothing but its storage shows what else was."""
    base = randn(6)

    def part(self, dim, start=None, end=None, step=1):
        return self[start:end:step]

    override = env.override_op_definition("aten::slice.Tensor", part, is_view_op=True)
    override.definition.rules.write = lambda base, new, *static: base.at[2:4].set(new).at[0].set(9.0)
    with override, debug.accuracy(), pytest.raises(AccuracyError, match="the storage written to: 1 of 6 elements"):
        base[2:4].add_(1)


def test_views_and_shared_storage_are_let_pass():
    x, z = randn(4, 6), torch.randn(3, dtype=torch.complex64).to("jax")
    with debug.accuracy() as report:
        x.t()[1:3].mul_(2)
        x[0].add_(x[1])
        x.diagonal().copy_(torch.zeros(4, device="jax"))
        x[:, ::2].neg_()
        torch.view_as_real(z).add_(1)
        z.conj().mul(2)
        z.imag.add_(1)
        x.view(torch.int32).bitwise_and_(1)
        torch.add(x, 1, out=torch.empty(4, 6, device="jax").t().t())
        x.sum().item()
        torch.sort(torch.tensor([1.0, 1.0, 0.0], device="jax"))
    assert not report.differences and sum(report.compared.values()) > 20


def test_an_index_out_of_range_is_a_difference():
    x, i = randn(3), torch.tensor([5], device="jax")
    x[i - 5]  # of a new signature, the device refuses it too
    with debug.accuracy(), pytest.raises(AccuracyError, match="CPU torch raises IndexError"):
        x[i]


def test_what_cancels_is_judged_by_double_precision():
    torch.manual_seed(0)
    x = torch.randn(20_000) * 1e3
    x = torch.cat([x, -x.flip(0)]).to("jax")
    with debug.accuracy() as report:
        x.sum()
        torch.softmax(x[:100], 0)
    assert report.compared["aten::sum"] == 1


def test_gradients_of_a_whole_op_are_compared(env):
    """A composite op's override differentiates itself, here wrongly, while its forward is right."""

    @jax.custom_vjp
    def linear(input, weight, bias=None):
        return input @ weight.T

    linear.defvjp(lambda x, w, b=None: (x @ w.T, (x, w)), lambda kept, g: (g @ kept[1], 2 * (g.T @ kept[0]), None))
    x, w = randn(3, 4, grad=True), randn(5, 4, grad=True)
    with env.override_op_definition("aten::linear", linear, is_jax_function=True), debug.accuracy():
        y = F.linear(x, w)
        with pytest.raises(
            AccuracyError, match="aten::linear differs from CPU torch in its backward.*\n.*\n.*gradient 1"
        ):
            y.sum().backward()


def test_a_torch_function_is_compared(env):
    x = randn(1, 2, 4)
    with env.override_op_definition("torch.nn.functional.interpolate", lambda *a, **k: x * 2, is_jax_function=False):
        with debug.accuracy(), pytest.raises(AccuracyError, match="torch.nn.functional.interpolate differs"):
            F.interpolate(x, size=4)


def test_a_jitted_function_runs_op_by_op(env):
    @torchax_core.jit
    def f(x):
        return torch.tanh(x) * 2

    x = randn(3)
    f(x)
    with debug.accuracy() as report:
        f(x)
    assert report.compared["aten::tanh"] == 1 and len(f.compilations) == 1
    with env.override_op_definition("aten::tanh", lambda self: self, is_jax_function=True), debug.accuracy():
        with pytest.raises(AccuracyError, match="aten::tanh differs"):
            f(x)


def test_traced_code_is_passed_by():
    with debug.accuracy() as report, debug.nans():
        result = jax.jit(torchax_core.interop.jax_view(lambda x: torch.log(x) + torch.zeros(3, device="jax")))(
            jnp.zeros(3)
        )
    assert not report.compared and bool(jnp.isinf(result).all())


def test_collectives_are_passed_over():
    """On the CPU they would wait for the group's other processes."""
    call = watching.Call("_c10d_functional::all_reduce", None, (), {}, "", None)
    assert accuracy._reason(call).startswith("collectives")
    assert not accuracy._reason(watching.Call("aten::add.Tensor", None, (), {}, "", None))


def test_another_thread_is_not_watched(env):
    done = []
    with env.override_op_definition("aten::tanh", lambda self: self, is_jax_function=True), debug.accuracy() as report:
        thread = threading.Thread(target=lambda: done.append(torch.tanh(randn(3))))
        thread.start()
        thread.join()
    assert len(done) == 1 and not report.compared


# -- NaN and infinity --------------------------------------------------------------------------------------------------


def test_the_op_that_makes_nan_raises():
    x = torch.tensor([0.0, 1.0], device="jax")
    with debug.nans(), pytest.raises(NonFiniteError) as caught:
        torch.log(x)
        y = x / x  # makes nan
        y + 1
    text = str(caught.value)
    assert "aten::div.Tensor made NaN" in text and "(float32[2], float32[2])" in text
    assert f"test_debug.py:{line_of('makes nan')}" in text


def test_nan_that_comes_in_is_not_made():
    bad = torch.tensor([float("nan"), 1.0], device="jax")
    with debug.nans():
        assert torch.isnan(bad + 1)[0]
        torch.full((2,), float("nan"), device="jax")
        bad.clone().masked_fill(bad > 0, float("nan"))
        torch.tensor([float("nan")]).to("jax")
        torch.zeros(2, device="jax").copy_(torch.tensor([float("nan"), 0.0]))
        bad[:1].mul_(2)
    with debug.infs():
        torch.zeros(2, device="jax").masked_fill(torch.tensor([True, False], device="jax"), -float("inf"))
        with pytest.raises(NonFiniteError, match="aten::log made inf"):
            torch.log(torch.zeros(2, device="jax"))


def test_written_nan_is_seen():
    x = torch.zeros(2, 2, device="jax")
    with debug.nans(), pytest.raises(NonFiniteError, match="aten::div_.Tensor made NaN"):
        x[0].div_(x[1])


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_nan_made_in_a_backward_names_the_forward(way):
    x = torch.zeros(2, device="jax", requires_grad=True)
    with debug.nans():
        loss = (torch.sqrt(x) * 0).sum()  # forward of it
        with pytest.raises(NonFiniteError) as caught:
            loss.backward() if way == "backward" else torch.autograd.grad(loss, x)
    text = str(caught.value)
    assert "aten::div.Tensor made NaN in backward (SqrtBackward0, of aten::sqrt at" in text
    assert f"test_debug.py:{line_of('forward of it')}" in text


def test_nan_made_in_the_backward_of_a_whole_op(env):
    root = env.override_op_definition(
        "aten::linear", lambda input, weight, bias=None: jnp.sqrt(input), is_jax_function=True
    )
    x = torch.zeros(2, 3, device="jax", requires_grad=True)
    with root, debug.nans():
        y = (F.linear(x, torch.eye(3, device="jax")) * 0).sum()
        with pytest.raises(NonFiniteError, match="aten::linear made NaN in its backward"):
            y.backward()


def test_a_jitted_step_is_run_again_and_its_state_put_back():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3).to("jax")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    runs = []

    @torchax_core.jit
    def step(x, scale):
        runs.append(1)
        optimizer.zero_grad()
        loss = (layer(x) / scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def state():
        buffers = [s["momentum_buffer"] for s in optimizer.state.values()]
        return [t.detach().cpu().clone() for t in [*layer.parameters(), *buffers]]

    x, one = torch.ones(2, 3, device="jax"), torch.ones((), device="jax")
    with debug.nans():
        step(x, one)
        step(x, one)
        traced, before = len(runs), state()
        with torch.no_grad():
            layer.bias.zero_()
        before[1].zero_()
        with pytest.raises(NonFiniteError, match=r"aten::div.Tensor made NaN at .*test_debug.py.*/ scale"):
            step(x * 0, one * 0)
        assert len(runs) == traced + 1
        assert all(map(torch.equal, before, state()))
        step(x, one)
    assert not any(t.isnan().any() for t in state()) and len(step.compilations) <= 2


def test_a_nan_that_only_the_program_makes_is_told(env):
    @torchax_core.jit
    def f(x):
        return torch.ops.aten.sin(x)

    def sin(self):  # NaN where jit traces it
        return jnp.sin(self) * (jnp.nan if torchax_core.tensor is None or f.tracing else 1.0)

    f.tracing = True
    with env.override_op_definition("aten::sin", sin, is_jax_function=True), debug.nans():
        x = randn(3)
        f.lower(x)
        f.tracing = False
        env._changed()
        with pytest.raises(NonFiniteError, match="none of its ops does so when they run one by one"):
            f(x)


def test_arrays_elsewhere_are_looked_at_by_the_device():
    """What lies on the CPU is read in place; the rest, by a program, must be judged alike."""
    for values in ([0.0, 1.0], [0.0, float("nan")], [-float("inf"), 0.0]):
        array = jnp.array(values)
        for what in ("isnan", "isinf"):
            assert bool(nonfinite._on_device(array, what)) == nonfinite._any(array, what)


# -- as settings -------------------------------------------------------------------------------------------------------


def test_settings_of_an_environment():
    x = torch.zeros(2, device="jax")
    with torchax_core.Environment(torchax_core.Config(debug_nans=True)), pytest.raises(NonFiniteError):
        x / x
    with torchax_core.Environment(torchax_core.Config(debug_infs=True)), pytest.raises(NonFiniteError):
        1 / x
    with torchax_core.Environment(torchax_core.Config(debug_accuracy=True)) as env:
        assert env.config.debug_accuracy == "raise"
        with env.override_op_definition("aten::tanh", lambda self: self + 1, is_jax_function=True):
            with pytest.raises(AccuracyError):
                torch.tanh(x)
    assert torch.isnan(x / x).all()


def test_wrong_settings(monkeypatch):
    with pytest.raises(ConfigError, match='must be False, "warn" or "raise"'):
        torchax_core.Config(debug_accuracy="maybe")
    with pytest.raises(ConfigError, match='takes "raise" or "warn"'), debug.accuracy("stop"):
        pass
    monkeypatch.setenv("TORCHAX_DEBUG", "nans, accuracy:warn")
    config = torchax_core.Config.from_environment()
    assert config.debug_nans and config.debug_accuracy == "warn" and not config.debug_infs
    monkeypatch.setenv("TORCHAX_DEBUG", "nan")
    with pytest.raises(ConfigError, match="unknown check 'nan'"):
        torchax_core.Config.from_environment()


def test_google_torchax_s_setting_compares_too():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Configuration(debug_accuracy_for_each_op=True)
    assert config.debug_accuracy == "warn"


def test_nothing_is_left_behind(env):
    before = env._lookup()
    with debug.nans(), debug.accuracy():
        assert torchax_core.current_env() is not env and torchax_core.current_env()._root is env
    assert torchax_core.current_env() is env and env._lookup() is before is env._kernels and env._watch is None


def test_the_programs_of_the_documentation():
    """docs/debugging.md, in order; the profile's is test_scopes.py's."""
    torch.manual_seed(0)
    text = (Path(__file__).parents[2] / "docs/debugging.md").read_text()
    programs = [p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "profile" not in p]
    names = {}
    raised = []
    for program in programs:
        wanted = re.search(r"# raises (\w+)", program)
        if wanted is None:
            exec(program, names)
            continue
        with pytest.raises(getattr(torchax_core.errors, wanted[1])) as caught:
            exec(program, names)
        raised.append(str(caught.value))
    gelu, division = raised
    assert "aten::gelu differs from CPU torch" in gelu and "aten::gelu(float32[16,8])" in gelu
    assert division.startswith("aten::div.Tensor made NaN") and "(float32[3], float32[])" in division
    assert not names["report"].differences

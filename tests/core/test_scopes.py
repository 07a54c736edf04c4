"""scopes.py: programs say which op and which module their instructions come from."""

import gzip
import json
import re

import pytest
import torch

import torchax_core


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def net():
    return Net().to("jax")


def names_in(text, function):
    """The op names of a program: `Net/head/linear/dot_general`."""
    return set(re.findall(rf'"jit\({re.escape(function)}\)/([^"]+)"', text))


def test_a_training_step_reads_in_modules_and_ops(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torchax_core.jit
    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    lowered = step.lower(torch.randn(3, 4, device="jax"))
    names = names_in(lowered.as_text(debug_info=True), "step")
    for wanted in (
        r"Net/layers\.0/fc/.*dot_general",
        r"Net/layers\.1/tanh/tanh",
        r"Net/head/.*dot_general",
        r"backward/Net/layers\.1/tanh_backward/mul",
        r"backward/Net/head/.*dot_general",
        r"mean/reduce_sum",
    ):
        assert any(re.fullmatch(wanted, name) for name in names), (wanted, names)
    assert not any(name.startswith("Net/mean") for name in names)
    assert "jit(step)/Net/layers.0" in lowered.compile().as_text()


def test_the_backward_of_an_op_kept_whole_is_its_module_s(net):
    with torchax_core.default_env().override_op_definition(
        "aten::linear", lambda input, weight, bias=None: input @ weight.T, is_jax_function=True
    ):
        f = torchax_core.jit(lambda x: net(x).sum().backward(), name="f")
        names = names_in(f.lower(torch.randn(3, 4, device="jax")).as_text(debug_info=True), "f")
    assert any(re.fullmatch(r"backward/Net/layers\.1/fc/transpose\(jvp\(linear\)\)/.*dot_general", n) for n in names), (
        names
    )


def test_a_module_and_its_method_are_named_alike(net):
    x = torch.randn(3, 4, device="jax")
    whole = names_in(torchax_core.jit(net, name="net").lower(x).as_text(debug_info=True), "net")
    method = names_in(torchax_core.jit(net.forward, name="net").lower(x).as_text(debug_info=True), "net")
    assert {name.removeprefix("Net/") for name in whole} == method
    assert any(name.startswith("layers.0/fc/") for name in method)


def test_a_module_that_fails_and_is_caught_leaves_no_name(net):
    @torchax_core.jit
    def f(x):
        try:
            net(x[:, :3])
        except RuntimeError:
            pass
        return torch.sin(x)

    names = names_in(f.lower(torch.randn(3, 4, device="jax")).as_text(debug_info=True), "f")
    assert "sin/sin" in names


def test_names_do_not_outlive_a_failed_trace(net):
    @torchax_core.jit
    def f(x):
        if net(x).sum() > 0:  # not while traced
            return x
        return -x

    with pytest.raises(torchax_core.errors.DataDependentError):
        f(torch.randn(3, 4, device="jax"))
    net(torch.randn(3, 4, device="jax"))
    names = names_in(
        torchax_core.jit(torch.sin, name="s").lower(torch.ones(2, device="jax")).as_text(debug_info=True), "s"
    )
    assert names == {"sin/sin"}


def test_programs_of_eager_ops_have_the_op_s_name():
    x = torch.ones(3, 5, device="jax")
    torch.erfc(x)
    kernel = torchax_core.default_env()._kernel(torch.ops.aten.erfc.default)
    entry = next(e for e in kernel.entries.values() if e.single.shape == (3, 5))
    assert "module @jit_erfc" in entry.run.lower(x.jax()).as_text()


def test_a_profile_reads_in_modules_and_ops(net, tmp_path):
    with torchax_core.debug.profile(tmp_path):
        net(torch.randn(3, 4, device="jax"))
    (file,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    spans = {e["name"]: e for e in events if e.get("ph") == "X"}
    assert {"Net", "layers.0", "fc", "aten::tanh"} <= set(spans)
    outer, inner = spans["Net"], spans["aten::tanh"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
    assert outer["tid"] == inner["tid"]

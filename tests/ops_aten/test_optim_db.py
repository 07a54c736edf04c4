"""Every optimizer of torch, with the settings that torch's own optimizer database has, against CPU torch: as a loop over
parameters, foreach, fused and capturable; eagerly and as part of a jitted step."""

import copy
import itertools

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import torchax_core

SPARSE = {"SparseAdam"}  # wants sparse gradients, of which the device has none
# What the host must know in order to go on: LBFGS, when to stop; Adafactor, the size of each parameter.
EAGER_ONLY = {"LBFGS", "Adafactor"}
OPTIMIZERS = [info for info in optim_db if info.name not in SPARSE]
STEPS = 3


def ways_of(info):
    """How torch can compute the step: each as arguments of the optimizer."""
    ways = [{"foreach": False}, {"foreach": True}] if "foreach" in info.supported_impls else [{}]
    return ways + ([{"fused": True}] if "fused" in info.supported_impls else [])


def settings_of(info):
    """Those of the database for the CPU, and one for recorded steps if there is any; not two that move uphill."""
    plain = info.optim_inputs_func(device="cpu")
    recorded = [x for x in info.optim_inputs_func(device="cuda") if x.kwargs.get("capturable")]  # only a name
    chosen = [x.kwargs for x in plain if x.desc != "maximize_strong_wolfe"] + [x.kwargs for x in recorded[-1:]]
    loop, *_ = ways = ways_of(info)
    for settings, way in zip(chosen, itertools.cycle(ways), strict=False):
        yield settings | (loop if any(isinstance(x, torch.Tensor) for x in settings.values()) else way)


def trained(info, settings, device, dtype=torch.float32, jitted=False):
    """Losses and parameters, as the optimizer goes."""
    shapes = [(3, 3), (3, 3)] if info.name == "Muon" else [(3, 3), (3,)]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in shapes]
    goals = [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]
    settings = copy.deepcopy(settings)
    if device == "cpu":
        settings.pop("capturable", None)  # the same step by other means, which CPU torch has no use for
    optimizer = info.optim_cls(parameters, **settings)

    def loss():
        optimizer.zero_grad()
        total = sum((p - goal).abs().square().sum() for p, goal in zip(parameters, goals, strict=True))
        total.backward()
        return total

    def step():
        if info.name == "LBFGS":
            return optimizer.step(loss)
        total = loss()
        optimizer.step()
        return total

    run = torchax_core.jit(step) if jitted else step
    return [run().detach().cpu() for _ in range(STEPS)] + [p.detach().cpu() for p in parameters]


def assert_trains_alike(info, settings, dtype=torch.float32, jitted=False):
    expected = trained(info, settings, "cpu", dtype)
    actual = trained(info, settings, "jax", dtype, jitted)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda said: f"{settings}: {said}")


@pytest.mark.parametrize("info", OPTIMIZERS, ids=lambda info: info.name)
def test_optimizer(info):
    for settings in settings_of(info):
        assert_trains_alike(info, settings)
    if info.supports_complex:
        assert_trains_alike(info, ways_of(info)[0], torch.complex64)


@pytest.mark.parametrize(
    "info, way",
    [
        pytest.param(info, way, id=f"{info.name}-{'-'.join(x for x in way if way[x]) or 'loop'}")
        for info in OPTIMIZERS
        if info.name not in EAGER_ONLY
        for way in ways_of(info)
    ],
)
def test_optimizer_in_a_jitted_step(info, way):
    rate = next((x.kwargs for x in info.optim_inputs_func(device="cpu") if x.desc == "non-default lr"), {})
    assert_trains_alike(info, {**rate, **way}, jitted=True)


@pytest.mark.parametrize("info", [x for x in OPTIMIZERS if x.name in EAGER_ONLY], ids=lambda info: info.name)
def test_steps_that_the_host_must_follow_cannot_be_jitted(info):
    with pytest.raises(torchax_core.errors.DataDependentError):
        trained(info, {}, "jax", jitted=True)

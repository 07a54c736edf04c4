"""Step counts of optimizers in jitted steps: one input of the program while they are equal, and right when they are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchax_core

_OPTIMIZERS = {
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW for loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}


class Run:
    """A small model that is trained on device "jax" by a jitted step, and by torch on the CPU beside it."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.models = [copy.deepcopy(model).to("jax"), model]
        self.optimizers = [make(list(m.parameters())) for m in self.models]
        self.inputs = torch.randn(7, 6)
        self.jitted = torchax_core.jit(self.step)

    def step(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        self.optimizers[which].zero_grad()
        loss = self.models[which](x).square().mean()
        loss.backward()
        self.optimizers[which].step()
        return loss

    def steps(self, count: int = 2) -> None:
        """Some steps of both; losses, weights and state must be the same."""
        for _ in range(count):
            torch.testing.assert_close(
                self.jitted(self.inputs.to("jax")).cpu(), self.step(self.inputs, 1), rtol=1e-5, atol=1e-6
            )
        for ours, theirs in zip(*(m.parameters() for m in self.models), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-6)
            state = self.optimizers[1].state[theirs]
            for name, value in self.optimizers[0].state[ours].items():
                torch.testing.assert_close(value.cpu(), state[name], rtol=1e-4, atol=1e-6, check_dtype=name != "step")

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        """The same change to both."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)

    @property
    def traces(self) -> int:
        return len(self.jitted.compilations)

    @property
    def counts(self) -> int:
        """How many arguments of the program are single floating-point numbers, beside the learning rate."""
        head = self.jitted.lower(self.inputs.to("jax")).as_text().partition("->")[0]
        return head.count("tensor<f64>") + head.count("tensor<f32>") - 1


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_every_optimizer_is_traced_once_and_as_on_the_cpu(name: str) -> None:
    run = Run(_OPTIMIZERS[name])
    run.steps(4)
    assert run.traces == 1, run.jitted.explain()


@pytest.mark.parametrize(("name", "counts"), [("AdamW", 1), ("AdamW fused", 1), ("AdamW for loop", 6)])
def test_the_program_takes_equal_counts_once(name: str, counts: int) -> None:
    run = Run(_OPTIMIZERS[name])
    run.steps(1)
    assert run.counts == counts


def test_a_count_written_to_alone_is_right_at_once() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    run.steps()
    run.both(lambda model, optimizer: optimizer.state[model[2].weight]["step"].fill_(40.0))
    run.steps()
    assert "step counts" in run.jitted.explain()
    assert [int(s["step"]) for s in run.optimizers[0].state.values()] == [4, 4, 42, 4, 4, 4]
    run.both(lambda model, optimizer: [s["step"].fill_(9.0) for s in optimizer.state.values()])
    run.steps()
    assert run.traces == 2  # the first program again: its counts are equal


def test_steps_outside_between_calls_do_not_trace_anew() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    run.steps()
    run.step(run.inputs.to("jax"))
    run.step(run.inputs, 1)
    run.steps()
    assert run.traces == 1 and run.counts == 1


def test_weights_that_take_no_part_keep_their_counts() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    run.steps()
    run.both(lambda model, _: model[0].requires_grad_(False))
    run.steps()
    run.both(lambda model, _: model[0].requires_grad_(True))
    run.steps()
    assert [int(s["step"]) for s in run.optimizers[0].state.values()] == [4, 4, 6, 6, 6, 6]


def test_loaded_state() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    run.steps()
    saved = [copy.deepcopy(o.state_dict()) for o in run.optimizers]
    run.steps()
    for optimizer, state in zip(run.optimizers, saved, strict=True):
        state["state"][1]["step"] += 3
        optimizer.load_state_dict(state)
    run.steps()
    assert [int(s["step"]) for s in run.optimizers[0].state.values()] == [4, 7, 4, 4, 4, 4]


def test_what_the_user_keeps_of_a_count_stays() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    run.steps()
    step = run.optimizers[0].state[run.models[0][0].weight]["step"]
    array, clone, shared = step.jax(), step.clone(), step.detach()
    run.steps()
    assert (float(array), clone.item(), shared.item(), step.item()) == (2.0, 2.0, 4.0, 4.0)


def test_groups_and_counts_of_their_own() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1, "betas": (0.5, 0.9)}]
        return torch.optim.AdamW(groups, lr=0.01)

    run = Run(make)
    run.steps(3)
    assert run.traces == 1


def test_a_scaler_skips_all_counts_of_a_step() -> None:
    run = Run(_OPTIMIZERS["AdamW"])
    scaler = torch.amp.GradScaler("jax", init_scale=4.0)

    def step(x: torch.Tensor) -> None:
        optimizer = run.optimizers[0]
        optimizer.zero_grad()
        scaler.scale(run.models[0](x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    jitted = torchax_core.jit(step)
    x = run.inputs.to("jax")
    for inputs in (x, x / 0, x):
        jitted(inputs)
    assert [int(s["step"]) for s in run.optimizers[0].state.values()] == [2] * 6
    assert jitted.shares_counts and "step counts" not in jitted.explain()
    run.step(run.inputs, 1)
    run.step(run.inputs, 1)
    for ours, theirs in zip(*(m.parameters() for m in run.models), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-6)


def test_an_optimizer_of_the_users_with_counts_that_part() -> None:
    class Odd(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for i, state in enumerate(self.state.values()):
                state["step"].add_(i % 2)
            return result

    run = Run(lambda ps: Odd(ps, lr=0.01))
    run.steps(3)
    assert run.traces == 1
    assert [int(s["step"]) for s in run.optimizers[0].state.values()] == [3, 6, 3, 6, 3, 6]

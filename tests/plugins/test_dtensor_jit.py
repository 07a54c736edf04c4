"""DTensors under torchax_core.jit, as arguments, results and state, in a world of one; among processes: training_cases.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchax_core
from torchax_ops_c10d import CollectiveError


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("jax", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("jax", (1,))
    dist.destroy_process_group()


def numbers(mesh, start=0.0, placement=None):
    whole = torch.arange(start, start + 12.0).reshape(4, 3)
    return distribute_tensor(whole, mesh, [placement or Shard(0)])


def same(found, expected):
    assert isinstance(found, DTensor) is isinstance(expected, DTensor)
    if isinstance(found, DTensor):
        assert found._spec == expected._spec and found.requires_grad is expected.requires_grad
        found, expected = found.to_local(), expected.to_local()
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu())


def test_arguments_and_results(mesh):
    def f(a, found):
        b = a.redistribute(mesh, [Replicate()])
        a.add_(1)
        return {"whole": b, "list": [b.T @ found["w"], a.sum()], "local": a.to_local() * 2, "argument": a}

    jitted = torchax_core.jit(f)
    for i in range(3):
        w = numbers(mesh, i, Replicate())
        mine, theirs = numbers(mesh, i), numbers(mesh, i)
        results, expected = jitted(mine, {"w": w}), f(theirs, {"w": w})
        assert results["argument"] is mine
        same(mine, theirs)
        for name in ("whole", "local"):
            same(results[name], expected[name])
        for found, right in zip(results["list"], expected["list"], strict=True):
            same(found, right)
    assert len(jitted.compilations) == 1
    jitted(numbers(mesh, 0.0, Replicate()), {"w": w})
    assert len(jitted.compilations) == 2  # another placement is another program
    partial = torchax_core.jit(lambda x: DTensor.from_local(x, mesh, [Partial()]))(torch.ones(2, device="jax"))
    assert partial.placements == (Partial(),) and partial.full_tensor().tolist() == [1, 1]


class Model(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(mesh) / 10)
        self.frozen = torch.nn.Parameter(numbers(mesh), requires_grad=False)
        self.hidden = numbers(mesh) * 0

    def forward(self, x):
        self.hidden = self.hidden * 0.5 + x
        return (self.weight * self.frozen * self.hidden).sum()


@pytest.mark.parametrize("form", ["zero_grad inside", "zero_grad outside", "accumulated"])
def test_gradients_state_and_places(mesh, form):
    found = []
    for wrap in (lambda f: f, torchax_core.jit):
        model = Model(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

        def step(x, model=model, optimizer=optimizer):
            if form == "zero_grad inside":
                optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            if form != "accumulated":
                optimizer.step()
            return loss.full_tensor().detach()

        run = wrap(step)
        losses = []
        for i in range(4):
            if form == "zero_grad outside":
                optimizer.zero_grad()
            losses.append(run(numbers(mesh, i)))
        state = [model.weight, model.weight.grad, model.hidden]
        if form != "accumulated":
            state += [optimizer.state[model.weight]["exp_avg"], optimizer.state[model.weight]["step"]]
        found.append([*losses, *state])
    for eager, jitted in zip(*found, strict=True):
        same(jitted, eager) if eager.dim() else torch.testing.assert_close(jitted.cpu(), eager.cpu(), check_dtype=False)
    assert len(run.compilations) == (2 if form == "accumulated" else 1), run.explain()
    assert "wrote to a tensor" not in run.explain()


def test_what_makes_a_new_program(mesh):
    model = Model(mesh)

    @torchax_core.jit
    def step(x):
        model.zero_grad()
        model(x).backward()

    def grad():
        model.hidden = model.hidden.detach() * 0
        step(numbers(mesh, 1.0))
        return None if model.weight.grad is None else model.weight.grad.to_local().tolist()

    first = grad()
    assert grad() == first and len(step.compilations) == 1
    with torch.no_grad():
        model.frozen.mul_(2)  # in place: the program has it for an input
    assert grad() == (2 * torch.tensor(first)).tolist() and len(step.compilations) == 1
    model.frozen = torch.nn.Parameter(model.frozen.detach() * 2, requires_grad=False)
    assert grad() == (4 * torch.tensor(first)).tolist()
    model.frozen._local_tensor = model.frozen.to_local() * 2
    assert grad() == (8 * torch.tensor(first)).tolist()
    model.weight.requires_grad_(False)
    model.frozen.requires_grad_(True)
    assert grad() is None and model.frozen.grad is not None


def test_arguments_that_want_gradients(mesh):
    @torchax_core.jit
    def f(x):
        (x.square().sum() * 3).backward()

    for i in range(3):
        x = numbers(mesh, i).requires_grad_()
        f(x)
        assert isinstance(x.grad, DTensor)
        same(x.grad, x.detach() * 6)
    f(x)
    same(x.grad, x.detach() * 12)
    assert len(f.compilations) == 1


def test_results_that_want_gradients_are_refused(mesh):
    with pytest.raises(CollectiveError, match="what makes a DTensor that wants gradients.*Call `backward` inside"):
        torchax_core.jit(lambda x: x * 2)(numbers(mesh).requires_grad_())
    with pytest.raises(CollectiveError, match="Call `backward` inside, or the function under torch.no_grad"):
        torchax_core.jit(lambda x: (x * 2).to_local())(numbers(mesh).requires_grad_())

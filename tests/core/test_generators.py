"""torchax_core.generators: torch.Generator(device="jax")."""

import copy
import pickle

import pytest
import torch

import torchax_core

DRAWS = {
    "randn": lambda g: torch.randn(3, device="jax", generator=g),
    "randint": lambda g: torch.randint(0, 99, (3,), device="jax", generator=g),
    "randperm": lambda g: torch.randperm(9, device="jax", generator=g),
    "normal_": lambda g: torch.zeros(3, device="jax").normal_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((30,), 0.5, device="jax"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(9, device="jax"), 5, generator=g),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_seed_gives_the_same_numbers(draw):
    generator = torch.Generator("jax")
    assert generator.manual_seed(3) is generator and generator.initial_seed() == 3
    first, second = (DRAWS[draw](generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, DRAWS[draw](torch.Generator(torch.device("jax", 0)).manual_seed(3)))
    run = torchax_core.jit(lambda: DRAWS[draw](generator))
    generator.manual_seed(3)
    assert torch.equal(run(), first) and torch.equal(run(), second)


@pytest.mark.parametrize(
    "copied",
    [lambda g: g.clone_state(), copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), lambda g: copied_state(g)],
)
def test_copies_draw_the_same(copied):
    generator = torch.Generator(device="jax:0").manual_seed(5)
    DRAWS["randn"](generator)
    other = copied(generator)
    assert other.device == generator.device == torch.device("jax:0") and isinstance(other, torch.Generator)
    assert torch.equal(DRAWS["randn"](other), DRAWS["randn"](generator))


def copied_state(generator):
    return torch.Generator(generator.device).set_state(generator.get_state())


def test_other_generators_are_torchs_own():
    ours, plain = torch.Generator().manual_seed(1), torch._C.Generator().manual_seed(1)
    assert type(ours) is type(plain) and ours.device.type == "cpu" and isinstance(plain, torch.Generator)
    assert torch.equal(torch.rand(3, generator=ours), torch.rand(3, generator=plain))
    assert issubclass(type(plain), torch.Generator) and not isinstance(3, torch.Generator)
    assert pickle.loads(pickle.dumps(plain)).device.type == "cpu"
    with pytest.raises(RuntimeError):
        torch.Generator("no such device")

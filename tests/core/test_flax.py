"""torchax_core.flax: linen and nnx modules as torch modules, against flax itself."""

from __future__ import annotations

import copy

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import torchax_core
from torchax_core.flax import FlaxNNModule


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = True):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not train)(jnp.tanh(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(jnp.tanh(self.norm(self.layers[0](x)))))


def close(ours, theirs) -> None:
    np.testing.assert_allclose(ours.detach().cpu().numpy(), np.array(theirs), rtol=1e-5, atol=1e-5)


def test_linen() -> None:
    x = torch.randn(5, 3, device="jax")
    module = FlaxNNModule(torchax_core.default_env(), Linen(), (x,), {"train": False})
    names = dict(module.named_parameters())
    assert "_params.params.Dense_0.kernel" in names and len(names) == 6 and len(dict(module.named_buffers())) == 2
    variables = module._nested({k.removeprefix("_params."): v.detach().jax() for k, v in module.state_dict().items()})
    module.eval()
    given = x.clone().requires_grad_()
    module(given, train=False).square().sum().backward()

    def loss(variables, x):
        return (Linen().apply(variables, x, train=False) ** 2).sum()

    close(module(x, train=False), Linen().apply(variables, x.jax(), train=False))
    wanted, wanted_x = jax.grad(loss, (0, 1))(variables, x.jax())
    close(given.grad, wanted_x)
    close(names["_params.params.Dense_0.kernel"].grad, wanted["params"]["Dense_0"]["kernel"])
    module.train()
    assert module(x).tolist() != module(x).tolist()  # dropout
    _, new = Linen().apply(variables, x.jax(), rngs={"dropout": jax.random.key(0)}, mutable=["batch_stats"])
    once = copy.deepcopy(module)
    once.load_state_dict({k: torchax_core.tensor(v) for k, v in _named(variables).items()})
    once(x)
    close(once._params.get_submodule("batch_stats.BatchNorm_0").mean, new["batch_stats"]["BatchNorm_0"]["mean"])


def _named(tree, path="_params"):
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key, value in tree.items() for k, v in _named(value, f"{path}.{key}").items()}


def test_nnx() -> None:
    source = Nnx(nnx.Rngs(0))
    x = torch.randn(5, 3, device="jax")
    module = FlaxNNModule(None, source)
    assert "_params.layers.0.kernel" in dict(module.named_parameters())
    wanted = [source(x.jax()) for _ in range(2)]  # statistics and dropout's stream move on, in both
    for value in wanted:
        close(module(x), value)
    close(module._params.norm.mean, source.norm.mean[...])

    def loss(source):
        return (source(x.jax()) ** 2).sum()

    gradients = nnx.grad(loss)(source)
    module(x).square().sum().backward()
    close(module._params.layers.get_submodule("0").kernel.grad, gradients["layers"][0]["kernel"][...])


def test_training_with_torch_optimizers_under_jit() -> None:
    module = FlaxNNModule(None, Nnx(nnx.Rngs(0)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(5, 3, device="jax")

    def step():
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    other = copy.deepcopy(module)
    losses = [step().item() for _ in range(3)]
    module.load_state_dict(other.state_dict())
    jitted = torchax_core.jit(step)
    np.testing.assert_allclose([jitted().item() for _ in range(3)], losses, rtol=1e-4)

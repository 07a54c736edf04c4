"""Training with optax, and deep stacks of equal layers as one loop: google/torchax's `torchax.train`.

optax is imported when first needed: `pip install optax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchax_core.bridge import call_jax, call_torch, lay_out, t2j_iso, torch_view
from torchax_core.environment import current_env
from torchax_core.functional import gradient_checkpoint, jax_value_and_grad
from torchax_core.jit import JittedFunction, jit
from torchax_core.jittable import call_with, extract_all_buffers
from torchax_core.random import RandomState

__all__ = ["ScannedModule", "make_train_step", "mark_sharding", "remat"]


def remat(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Torch code that saves no activations for its backward: gradient_checkpoint with jax.checkpoint's options as keywords."""
    return gradient_checkpoint(function, kwargs)


def mark_sharding(x: torch.Tensor, sharding: Any) -> torch.Tensor:
    """`x` laid out by a jax sharding; in a program, a constraint on it. Same values, with gradients."""
    return lay_out(x, sharding)


def make_train_step(
    model_fn: Callable[[Any, Any, Any], Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optax_optimizer: Any,
    remat_policy: Any = None,
) -> Callable[..., Any]:
    """A training step for an optax optimizer: `step(weights, buffers, opt_state, args, label)`.

    model_fn:        (weights, buffers, args) -> result; weights and buffers are pytrees of Tensors.
    loss_fn:         (result, label) -> a scalar Tensor.
    optax_optimizer: its state is made by `call_jax(optimizer.init, weights)`.
    remat_policy:    a policy of jax.checkpoint_policies, to compute what it does not save again in the backward; None: no such.
    The step returns (loss, weights, opt_state), new Tensors. It is not compiled: `jax_jit(step, {"donate_argnums": (0, 2)})`.
    Source: https://optax.readthedocs.io/en/latest/getting_started.html
    """
    import optax

    def loss(weights: Any, buffers: Any, args: Any, label: Any) -> torch.Tensor:
        with jax.named_scope("compute_loss"):
            return loss_fn(model_fn(weights, buffers, args), label)

    checked = loss if remat_policy is None else gradient_checkpoint(loss, {"policy": remat_policy})
    value_and_grad = jax_value_and_grad(checked)

    def step(weights: Any, buffers: Any, opt_state: Any, args: Any, label: Any) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            with jax.named_scope("compute_gradient"):
                value, gradients = value_and_grad(weights, buffers, args, label)
            with jax.named_scope("optimizer_updates"):
                updates, opt_state = call_jax(optax_optimizer.update, gradients, opt_state, weights)
                weights = call_jax(optax.apply_updates, weights, updates)
        return value, weights, opt_state

    return step


class _Holder:
    """Keeps a module from being registered as a child."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


class ScannedModule(torch.nn.Module):
    """A list of equal layers, each fed the one before's result, as one `jax.lax.scan` over their stacked weights.

    module_list:       layers of one class whose tensors have the same names, shapes and dtypes; (n layers) weights of shape
                       (...) become one parameter of shape (n, ...), `params["a___weight"]` for "a.weight".
    checkpoint_policy: what jax.checkpoint saves of each layer for the backward; None: its input only. With
                       `jax.checkpoint_policies.everything_saveable` nothing is computed twice.

    `scanned(x, *rest, **kwargs)` is `for layer in layers: x = layer(x, *rest, **kwargs)`: same results, gradients, random
    numbers and buffers, but a program whose size does not grow with their number.
    Raises ValueError for layers that differ, or one that is there twice.
    """

    def __init__(self, module_list: Sequence[torch.nn.Module], checkpoint_policy: Any = None) -> None:
        super().__init__()
        layers = list(module_list)
        _check_equal(layers)
        self.checkpoint_policy = checkpoint_policy
        self.count = len(layers)
        self.one = _Holder(layers[0])
        tensors = [{**params, **others} for params, others in map(extract_all_buffers, layers)]
        parameters = dict(layers[0].named_parameters(remove_duplicate=False))
        saved = layers[0].state_dict()
        self.names: list[str] = []
        self.params = torch.nn.ParameterDict()
        seen: set[int] = set()
        for name, first in tensors[0].items():
            if id(first) in seen:  # tied within the layer: call_with gives both names the one tensor
                continue
            seen.add(id(first))
            self.names.append(name)
            stacked = torch.stack([layer[name].detach() for layer in tensors])
            if name in parameters:
                self.params[_flat(name)] = torch.nn.Parameter(stacked, requires_grad=first.requires_grad)
            else:
                self.register_buffer(_flat(name), stacked, persistent=name in saved)
        self._compiled: JittedFunction | None = None
        self._draws: dict[Any, int] = {}
        self.train(layers[0].training)

    def train(self, mode: bool = True) -> ScannedModule:
        """torch's, for the layers too."""
        super().train(mode)
        self.one.module.train(mode)
        return self

    def forward(self, x: Any, *rest: Any, **kwargs: Any) -> Any:
        """The last layer's result. `rest` and `kwargs` go to every layer."""
        if self._compiled is None:
            self._compiled = jit(self._scan, name=f"scan of {self.count} {type(self.one.module).__name__}")
        return self._compiled(x, *rest, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def _scan(self, x: Any, *rest: Any, **kwargs: Any) -> Any:
        layer = self.one.module
        env = current_env()
        weights = {name: self.params[_flat(name)] for name in self.names if _flat(name) in self.params}
        buffers = {name: getattr(self, _flat(name)) for name in self.names if name not in weights}
        written: set[str] = set()

        def run(weights: Any, buffers: Any, state: RandomState, x: Any) -> Any:
            held = {name: (value._store, value._store.version) for name, value in buffers.items()}
            with env.drawing_from(state):
                result = call_with(layer, layer.__call__, {**weights, **buffers}, (x, *rest_inside[0]), rest_inside[1])
            written.update(name for name, (store, version) in held.items() if store.version != version)
            return result, {name: buffers[name] for name in sorted(written)}

        rest_inside: list[Any] = [rest, kwargs]
        key, first, each = self._random_numbers(run, weights, buffers, x)

        def scan(x: Any, weights: Any, buffers: Any, key: Any, first: Any, rest: Any, kwargs: Any) -> Any:
            rest_inside[:] = torch_view((rest, kwargs))

            def one(carry: Any, stacked: Any) -> Any:
                weights, buffers, number = stacked
                state = RandomState.of_key(key, env.config.random_impl)
                state.count = first + number * each
                return call_torch(lambda w, b, x: run(w, b, state, x), weights, buffers, carry)

            body = jax.checkpoint(one, policy=self.checkpoint_policy, prevent_cse=False)
            return jax.lax.scan(body, x, (weights, buffers, jnp.arange(self.count, dtype=jnp.uint32)))

        result, new = call_jax(scan, x, weights, buffers, key, first, rest, kwargs)
        with torch.no_grad():
            for name, value in new.items():
                buffers[name].copy_(value)
        return result

    def _random_numbers(self, run: Any, weights: Any, buffers: Any, x: Any) -> tuple[Any, Any, int]:
        """A key, the count of the first draw, and the draws each layer makes, which it takes one layer's trace to know."""
        env = current_env()
        one_of_each = [
            {n: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for n, a in t2j_iso(group).items()}
            for group in ({n: w.detach() for n, w in weights.items()}, buffers)
        ]
        state = RandomState.of_key(jax.random.key(0, impl=env.config.random_impl), env.config.random_impl)
        with torch.no_grad():
            jax.eval_shape(
                lambda weights, buffers, x: call_torch(lambda w, b, x: run(w, b, state, x), weights, buffers, x),
                *one_of_each,
                t2j_iso(x),
            )
        each = int(state.count)
        draws = [env._random_arguments(None) for _ in range(each * self.count)]
        return (*(draws[0] if draws else (jax.random.key(0, impl=env.config.random_impl), 0)), each)


def _flat(name: str) -> str:
    return name.replace(".", "___")


def _check_equal(layers: list[torch.nn.Module]) -> None:
    if not layers:
        raise ValueError("ScannedModule needs at least one layer, but `module_list` is empty.")
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(
            "ScannedModule: a layer is in `module_list` twice; its weights would come apart. Call it in a loop instead."
        )

    def facts(layer: torch.nn.Module) -> dict[str, Any]:
        params, others = extract_all_buffers(layer)
        return {n: (tuple(t.shape), t.dtype, n in params) for n, t in {**params, **others}.items()}

    first = facts(layers[0])
    for i, layer in enumerate(layers[1:], 1):
        if type(layer) is not type(layers[0]):
            raise ValueError(
                f"ScannedModule: layer {i} is a {type(layer).__name__}, layer 0 a {type(layers[0]).__name__}."
            )
        other = facts(layer)
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"ScannedModule needs equal layers, but {name} is {other.get(name, 'missing')} in layer {i} and "
                    f"{first.get(name, 'missing')} in layer 0 (shape, dtype, trained)."
                )

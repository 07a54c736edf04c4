"""Flax modules, of linen or nnx, as torch modules: their weights are torch parameters, their forward has torch gradients.

Flax is imported when first needed: `pip install torchax-core[flax]`.
Source: https://flax.readthedocs.io
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from torchax_core.bridge import call_jax, jax_view
from torchax_core.environment import Environment, current_env
from torchax_core.tensor import wrap_array

__all__ = ["FlaxNNModule"]

_Path = tuple[Any, ...]


class FlaxNNModule(torch.nn.Module):
    """A flax module as a torch module on device "jax".

    env:           the environment whose random key initialises a linen module; None: the active one.
    flax_module:   a `flax.linen.Module`, initialised here with sample_args and sample_kwargs; or a `flax.nnx.Module`, whose
                   weights are taken over as they are.
    sample_args:   Tensors or arrays as `forward` will get them, for linen.

    linen's collection "params" and nnx's `Param`s are parameters, all else (batch statistics, counts, random streams) buffers,
    under `_params` by their path: `_params.params.Dense_0.kernel`. In train mode what the module changes in buffers is kept,
    and a linen module that draws random numbers gets a new key for "dropout" at every call.
    """

    def __init__(
        self,
        env: Environment | None,
        flax_module: Any,
        sample_args: tuple[Any, ...] = (),
        sample_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        import flax.nnx

        self._env = env
        self._flax_module = flax_module
        self._params = torch.nn.Module()
        self._paths: dict[str, _Path] = {}
        self._keys: dict[str, str] = {}  # buffers that hold random keys' data, and the keys' implementation
        self._graph: Any = None
        if isinstance(flax_module, flax.nnx.Module):
            self._graph, params, rest = flax.nnx.split(flax_module, flax.nnx.Param, ...)
            self._states = params, rest
            trained, others = _flat(flax.nnx.to_pure_dict(params)), _flat(flax.nnx.to_pure_dict(rest))
        else:
            key = (env or current_env()).get_and_rotate_prng_key()
            args, kwargs = jax_view((sample_args, sample_kwargs or {}))
            variables = flax_module.init(key, *args, **kwargs)
            flat = _flat(flax.core.unfreeze(variables))
            trained = {path: value for path, value in flat.items() if path[0] == "params"}
            others = {path: value for path, value in flat.items() if path[0] != "params"}
        for path, value in trained.items():
            self._put(path, torch.nn.Parameter(wrap_array(value)))
        for path, value in others.items():
            if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                self._keys[_name(path)] = str(jax.random.key_impl(value))
                value = jax.random.key_data(value)
            self._put(path, wrap_array(value))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The flax module's result; arguments are torch's, as its own are jax's."""
        params = dict(self._params.named_parameters())
        buffers = dict(self._params.named_buffers())
        call = self._linen if self._graph is None else self._nnx
        result, new = call_jax(call, params, buffers, args, kwargs, self._rngs(kwargs))
        with torch.no_grad():
            for name, value in new.items():
                buffers[name].copy_(value)
        return result

    def _rngs(self, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if self._graph is not None or not self.training or "rngs" in kwargs:
            return None
        return {"dropout": (self._env or current_env()).get_and_rotate_prng_key()}

    def _linen(self, params: Any, buffers: Any, args: Any, kwargs: Any, rngs: Any) -> Any:
        variables = self._nested({**params, **buffers})
        changing = sorted({path[0] for name, path in self._paths.items() if name in buffers})
        options = {} if rngs is None else {"rngs": rngs}
        if not self.training or not changing or "mutable" in kwargs:
            return self._flax_module.apply(variables, *args, **kwargs, **options), {}
        result, new = self._flax_module.apply(variables, *args, **kwargs, **options, mutable=changing)
        return result, {_name(path): value for path, value in _flat(new).items() if _name(path) in buffers}

    def _nnx(self, params: Any, buffers: Any, args: Any, kwargs: Any, rngs: Any) -> Any:
        import flax.nnx

        states = [jax.tree.map(lambda x: x, state) for state in self._states]
        for state, values in zip(states, (params, buffers), strict=True):
            flax.nnx.replace_by_pure_dict(state, self._nested(values))
        module = flax.nnx.merge(self._graph, *states)
        result = module(*args, **kwargs)
        if not self.training:
            return result, {}
        _, _, rest = flax.nnx.split(module, flax.nnx.Param, ...)
        new = {_name(path): value for path, value in _flat(flax.nnx.to_pure_dict(rest)).items()}
        return result, {
            name: jax.random.key_data(v) if name in self._keys else v for name, v in new.items() if name in buffers
        }

    def _put(self, path: _Path, value: torch.Tensor) -> None:
        owner = self._params
        *parents, last = map(str, path)
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        if isinstance(value, torch.nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)
        self._paths[_name(path)] = path

    def _nested(self, values: dict[str, Any]) -> dict[Any, Any]:
        """Nested dicts, by the paths, of values by name."""
        tree: dict[Any, Any] = {}
        for name, value in values.items():
            if name in self._keys:
                value = jax.random.wrap_key_data(value, impl=self._keys[name])
            *parents, last = self._paths[name]
            node = tree
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
        return tree


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


def _flat(tree: Any, path: _Path = ()) -> dict[_Path, Any]:
    """The leaves of nested dicts by path."""
    if not hasattr(tree, "items"):
        return {path: tree}
    return {p: v for key, value in tree.items() for p, v in _flat(value, (*path, key)).items()}

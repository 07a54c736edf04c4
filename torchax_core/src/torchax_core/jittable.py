"""A torch module as a pure function of its weights: extract_jax for jax code, JittableModule for torch code."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax_core.bridge import call_torch, jax_view, t2j_copy
from torchax_core.environment import Environment, current_env
from torchax_core.functional import jax_jit
from torchax_core.tensor import Tensor

__all__ = [
    "JittableModule",
    "call_with",
    "extract_all_buffers",
    "extract_jax",
    "set_all_buffers",
    "tensor_places",
    "tied_names",
]


def extract_all_buffers(m: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(parameters that are trained, every other tensor) of a module by name: frozen parameters, buffers, plain attributes."""
    params: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for name, members, attribute in tensor_places(m):
        value = members[attribute]
        trained = isinstance(value, torch.nn.Parameter) and value.requires_grad
        (params if trained else others)[name] = value
    return params, others


def tensor_places(m: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every tensor of a module by name, with the dict that holds it and its key there."""
    for prefix, module in m.named_modules(remove_duplicate=False):
        for members in (module._parameters, module._buffers, vars(module)):
            for name, value in members.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}" if prefix else name, members, name


def _signature(method: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return []


def _signed(function: Callable[..., Any], parameters: list[inspect.Parameter], before: int) -> Callable[..., Any]:
    """`function` with a method's parameters to be seen, after so many of its own: jax_jit knows arguments by their names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = [inspect.Parameter(f"_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(before)]
    call.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    return call


def _without_tensors(options: dict[str, Any]) -> dict[str, Any] | None:
    """Options of jax_jit for a method's own arguments, of those for functional_call's; None if they say more than that."""
    moved: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("static_argnums", "donate_argnums"):
            numbers = (value,) if isinstance(value, int) else tuple(value)
            if any(0 <= n < 3 for n in numbers):
                return None
            moved[name] = tuple(n - 3 if n >= 0 else n for n in numbers)
        elif name == "static_argnames":
            moved[name] = value
        else:
            return None
    return moved


def set_all_buffers(m: torch.nn.Module, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
    """Put tensors into a module, by the names that extract_all_buffers gives. Raises KeyError for a name it has not."""
    known = [{**d} for d in extract_all_buffers(m)]
    for given, have, is_parameter in ((params, known[0], True), (buffers, known[1], False)):
        for name, value in given.items():
            if name not in have:
                raise KeyError(f"{type(m).__name__} has no {'parameter' if is_parameter else 'buffer'} {name!r}.")
            owner, _, attribute = name.rpartition(".")
            wrap = is_parameter or isinstance(have[name], torch.nn.Parameter)
            if wrap and not isinstance(value, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=is_parameter)
            setattr(m.get_submodule(owner), attribute, value)


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """The other names of each tensor that has several, by its first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if id(value) in first:
            names.setdefault(first[id(value)], []).append(name)
        else:
            first[id(value)] = name
    return names


class _Method(torch.nn.Module):
    """A method of a module as the forward of another, for torch.func.functional_call."""

    def __init__(self, model: torch.nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


@contextlib.contextmanager
def _attributes(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Plain tensor attributes replaced for a while."""
    places = []
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        places.append((vars(model.get_submodule(owner)), attribute, value))
    held = [(members, attribute, members[attribute]) for members, attribute, _ in places]
    try:
        for members, attribute, value in places:
            members[attribute] = value
        yield
    finally:
        for members, attribute, value in held:
            members[attribute] = value


def call_with(model: torch.nn.Module, method: Callable[..., Any], state: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """`method(*args, **kwargs)` of `model` with the tensors in `state` in the place of its own. Ties stay tied."""
    params, others = extract_all_buffers(model)
    known = {**params, **others}
    unknown = sorted(set(state) - set(known))
    if unknown:
        raise KeyError(
            f"{type(model).__name__} has no tensor(s) {', '.join(unknown)}; it has {', '.join(sorted(known))}."
        )
    full = dict(state)
    for first, names in tied_names(known).items():
        group = [first, *names]
        given = next((state[name] for name in group if name in state), None)
        if given is not None:
            full.update({name: state.get(name, given) for name in group})
    registered = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    registered |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    plain = {name: value for name, value in full.items() if name not in registered}
    with _attributes(model, plain):
        members = {f"model.{name}": value for name, value in full.items() if name in registered}
        return torch.func.functional_call(_Method(model, method), members, args, kwargs, tie_weights=False)


def extract_jax(
    mod: torch.nn.Module, env: Environment | None = None
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """A module as `(weights, function)` for jax: `function(weights, args)` is `mod(*args)`, pure, on jax arrays.

    weights:  dict of arrays: copies of parameters, buffers and plain tensor attributes, tied ones once; the module itself stays
              where and what it is.
    function: function(weights, args, kwargs=None, *, rng=None, return_weights=False), for jax.jit, jax.grad, jax.vmap,
              jax.hessian, jax.lax.scan. rng: a jax key for its random ops. With return_weights, `(result, weights)`, the
              weights with what the module wrote into its buffers (BatchNorm's statistics, when training). It is in the mode,
              train or eval, that the module was in when extracted.
    Source: https://docs.jax.dev/en/latest/jax.nn.html
    """
    params, others = extract_all_buffers(mod)
    aliases = {name for names in tied_names({**params, **others}).values() for name in names}
    weights = t2j_copy({k: v.detach() for k, v in {**params, **others}.items() if k not in aliases})
    modes = {module: module.training for module in mod.modules()}

    def function(weights: Any, args: Any, kwargs: Any = None, *, rng: Any = None, return_weights: bool = False) -> Any:
        def run(weights: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
            with env or contextlib.nullcontext(), _in_modes(modes), _drawing_from(current_env(), rng):
                result = call_with(mod, mod.__call__, weights, tuple(args), kwargs or {})
            return (result, weights) if return_weights else result

        return call_torch(run, weights, args, kwargs)

    return weights, function


@contextlib.contextmanager
def _in_modes(modes: dict[torch.nn.Module, bool]) -> Iterator[None]:
    held = {module: module.training for module in modes}
    try:
        for module, training in modes.items():
            module.training = training
        yield
    finally:
        for module, training in held.items():
            module.training = training


def _drawing_from(env: Environment, rng: Any) -> Any:
    if rng is None:
        return contextlib.nullcontext()
    return env.override_property(prng=jax_view(rng))


class JittableModule(torch.nn.Module):
    """A module whose methods run as compiled programs, and are pure functions of its parameters and buffers if asked to.

    m:                the module, on device "jax". `isinstance` takes this one for it, and its attributes are seen.
    env:              the environment to run in; default: the one that is active.
    extra_jit_args:   options of jax_jit (static_argnums, donate_argnums, ...), for functional_call's arguments after the
                      method: params is 0, buffers 1, rng 2, the method's own start at 3.
    dedup_parameters: list a tied parameter once in `params`.

    `params` and `buffers` are dicts of tensors by name; what is put into them is what the next call runs with. Gradients of
    a call's results reach them, and buffers that the module writes to keep what was written.
    """

    def __init__(
        self,
        m: torch.nn.Module,
        env: Environment | None = None,
        extra_jit_args: dict[str, Any] | None = None,
        dedup_parameters: bool = True,
    ) -> None:
        super().__init__()
        self.params, self.buffers = extract_all_buffers(m)  # type: ignore[assignment]
        self._model = m
        self._env = env
        self._extra_jit_args = extra_jit_args or {}
        self._jitted: dict[str, Callable[..., Any]] = {}
        if dedup_parameters:
            for tensors in (self.params, self.buffers):
                for names in tied_names(tensors).values():  # type: ignore[arg-type]
                    for name in names:
                        del tensors[name]  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(jittable, type(m)) is true
        return type(self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> JittableModule:
        # what was compiled is of this model: the copy compiles its own
        new = JittableModule(copy.deepcopy(self._model, memo), self._env, self._extra_jit_args)
        memo[id(self)] = new
        for name in ("params", "buffers"):
            tensors = getattr(self, name)
            setattr(new, name, {key: copy.deepcopy(value, memo) for key, value in tensors.items()})
        return new

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, compiled."""
        return self.jittable_call("forward", *args, **kwargs)

    def functional_call(
        self, method_or_name: Any, params: dict[str, Any], buffers: dict[str, Any], rng: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A method of the module, or a function of the module, with these tensors for its own; not compiled by itself.

        rng: a jax key for random ops; None: the environment's.
        """
        if isinstance(method_or_name, str):
            method = self._method(method_or_name)
        elif callable(method_or_name):
            method = functools.partial(method_or_name, self._model)
        else:
            raise TypeError(
                f"functional_call takes a method's name or a function of the module, but got {method_or_name!r}."
            )
        with self._env or contextlib.nullcontext(), _drawing_from(self._env or current_env(), rng):
            return call_with(self._model, method, {**params, **buffers}, args, kwargs)

    def _method(self, name: str) -> Callable[..., Any]:
        return self._model.__call__ if name == "forward" else getattr(self._model, name)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def with_rng(self, rng: jax.Array) -> Iterator[JittableModule]:
        """Calls in the block draw their random numbers from this jax key."""
        with (self._env or current_env()).override_property(prng=rng):
            yield self

    def make_jitted(self, key: str) -> None:
        """Let the method of that name be compiled when it is called as an attribute of this module."""
        signature = _signature(getattr(self._model, key))
        compiled = jax_jit(_signed(functools.partial(self.functional_call, key), signature, 3), self._extra_jit_args)
        plain = set(self.buffers) - {name for name, _ in self._model.named_buffers()}  # `.to` does not move these
        plain -= {name for name, _ in self._model.named_parameters()}
        options = _without_tensors(self._extra_jit_args)
        direct = None if options is None else jax_jit(_signed(self._method(key), signature, 0), options)
        places = {name: (members, attribute) for name, members, attribute in tensor_places(self._model)}

        def call(*args: Any, **kwargs: Any) -> Any:
            own = direct is not None
            for tensors in (self.params, self.buffers):
                for name, value in tensors.items():  # type: ignore[operator]
                    members, attribute = places.get(name, ({}, ""))
                    own = own and members.get(attribute) is value
                    if not isinstance(value, Tensor) and name not in plain:
                        raise RuntimeError(
                            f"JittableModule({type(self._model).__name__}): {name} is on device {value.device}. Move the "
                            "module before it is wrapped: `JittableModule(m.to('jax'))`."
                        )
            with self._env or contextlib.nullcontext():
                if own:  # the module's own tensors need not be handed over: they are state of the compiled method
                    return direct(*args, **kwargs)  # type: ignore[misc]
                return compiled(self.params, self.buffers, None, *args, **kwargs)

        self._jitted[key] = call

    def jittable_call(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method of that name, compiled."""
        if method_name not in self._jitted:
            self.make_jitted(method_name)
        return self._jitted[method_name](*args, **kwargs)

    def __getattr__(self, key: str) -> Any:
        if key in ("_model", "_jitted"):
            return super().__getattr__(key)
        jitted = self.__dict__.get("_jitted", {})
        return jitted[key] if key in jitted else getattr(self._model, key)

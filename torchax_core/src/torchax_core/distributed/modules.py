"""Modules over a mesh: their tensors laid out by name, moved to the devices part by part, or made there in the first place."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from torchax_core.convert import array_from_torch
from torchax_core.distributed.layouts import Layout, check_axes, sharding_of_layout
from torchax_core.distributed.meshes import AnyMesh, as_mesh
from torchax_core.functional import jax_jit
from torchax_core.jittable import extract_all_buffers, tensor_places, tied_names
from torchax_core.tensor import Aval, Tensor, make_tensor

__all__ = ["Rules", "make_in_shards", "named_tensors", "place_in_shards", "shard_module", "shardings_by_rules"]

Pattern = str | re.Pattern[str]
Rules = Mapping[Any, Layout] | Sequence[tuple[Pattern, Layout]] | Callable[[str, torch.Tensor], Layout]
_UNMATCHED = ("replicate", "error")


def shard_module(
    module: torch.nn.Module,
    mesh: AnyMesh,
    rules: Rules,
    *,
    unmatched: str = "replicate",
    init: Callable[[torch.nn.Module], Any] | None = None,
) -> torch.nn.Module:
    """Lay out a module's parameters and buffers over a mesh, by their names, in place; returns the module.

    mesh:      a jax.sharding.Mesh or torch's DeviceMesh.
    rules:     {pattern: layout} or [(pattern, layout), ...]; the first pattern that matches a name decides. A pattern is a glob
               of the whole name, "*.attn.weight", or a compiled regular expression, to be found in it. A layout is
               jax.P("tp", None), DTensor's [Replicate(), Shard(0)], or None: whole on every device.
               Or a function, (name, tensor) -> layout.
    unmatched: "replicate": tensors that no rule matches are whole on every device; "error": they are a ValueError.
    init:      for tensors on "meta", which have no values: called for each module that has some, inner ones first, to give
               them some. Default: the module's `_init_weights` (Hugging Face), else `reset_parameters()` of each.

    On "jax", tensors are laid out anew; from the CPU they are moved one by one, each device being sent its part; those on
    "meta" are computed in their parts, by one program: no device, nor the host, holds a whole one. Tied tensors stay tied.
    Optimizer state made afterwards lies as its parameter does.
    Raises ValueError, before anything is changed, for a pattern that matches nothing, an axis that the mesh has not, a
    dimension that cannot be split into equal parts, and for tensors on "meta" that `init` leaves without values.
    """
    tensors = {name: tensor for name, tensor in named_tensors(module).items() if _is_ours(module, name, tensor)}
    shardings = shardings_by_rules(tensors, as_mesh(mesh), rules, unmatched)
    made = {name: sharding for name, sharding in shardings.items() if tensors[name].device.type == "meta"}
    if made:
        make_in_shards(module, made, lambda: _initialised(module, init))
    return place_in_shards(module, {name: shardings[name] for name in shardings if name not in made})


def _is_ours(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Plain attributes on the CPU stay there, as they do in `Module.to`."""
    owner, _, attribute = name.rpartition(".")
    return tensor.device.type in ("jax", "meta") or attribute not in vars(module.get_submodule(owner))


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module by name, under all its names."""
    params, others = extract_all_buffers(module)
    return {**params, **others}


def shardings_by_rules(
    tensors: dict[str, torch.Tensor], mesh: jax.sharding.Mesh, rules: Rules, unmatched: str = "replicate"
) -> dict[str, Any]:
    """The sharding of each tensor, under its first name."""
    if unmatched not in _UNMATCHED:
        raise ValueError(f"shard_module: unmatched is one of {', '.join(map(repr, _UNMATCHED))}, not {unmatched!r}.")
    ties = tied_names(tensors)
    aliases = {alias for names in ties.values() for alias in names}
    firsts = [name for name in tensors if name not in aliases]
    if callable(rules):
        named = {name: (f"the rules, of {name!r}", rules(name, tensors[name])) for name in firsts}
    else:
        ordered = list(rules.items() if isinstance(rules, Mapping) else rules)
        _check(ordered, tensors, mesh)
        named = {}
        for name in firsts:
            names = (name, *ties.get(name, ()))
            rule = next((r for r in ordered if any(_matches(r[0], n) for n in names)), None)
            if rule is not None:
                named[name] = f"the rule {_text(rule[0])} for {name!r}", rule[1]
    left = [name for name in firsts if name not in named]
    if left and unmatched == "error":
        raise ValueError(
            f"shard_module: no rule matches {', '.join(left)}. Add one, `('*', None)` at the end for all that is left, or let "
            "such tensors be whole on every device, with unmatched='replicate'."
        )
    return {
        name: sharding_of_layout(mesh, layout, tensors[name].shape, f"shard_module: {what}")
        for name, (what, layout) in ((n, named.get(n, ("", None))) for n in firsts)
    }


def _text(pattern: Pattern) -> str:
    return repr(pattern if isinstance(pattern, str) else pattern.pattern)


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern.search(name) is not None


def _check(rules: list[tuple[Pattern, Layout]], tensors: dict[str, torch.Tensor], mesh: jax.sharding.Mesh) -> None:
    for pattern, layout in rules:
        if isinstance(layout, jax.P):
            check_axes(mesh, layout, f"shard_module: the rule {_text(pattern)}")
        if not any(_matches(pattern, name) for name in tensors):
            near = difflib.get_close_matches(pattern, tensors, 3, 0.3) if isinstance(pattern, str) else []
            raise ValueError(
                f"shard_module: the rule {_text(pattern)} matches no tensor of the module. A pattern is matched against whole "
                f"names, such as {', '.join(near or list(tensors)[:3])}; `*` stands for anything, dots too."
            )


# -- moving ----------------------------------------------------------------------------------------


def place_in_shards(module: torch.nn.Module, shardings: dict[str, Any]) -> torch.nn.Module:
    """Lay out tensors of a module on the CPU or on "jax", by name, in place. Gradients go with their parameters."""
    tensors = named_tensors(module)
    move: dict[int, Any] = {}
    kept: list[torch.Tensor] = []  # their ids must stay theirs
    for name, sharding in shardings.items():
        tensor = tensors[name]
        for part in (tensor, tensor.grad) if tensor.is_leaf else (tensor,):
            if isinstance(part, Tensor):
                part.shard_(sharding)  # type: ignore[attr-defined]
            elif part is not None:
                move[id(part)] = sharding
                kept.append(part)
    moved: dict[int, torch.Tensor] = {}

    def to_its_place(tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if isinstance(tensor, Tensor) or key not in move:
            return tensor
        if key not in moved:
            array = array_from_torch(tensor.cpu(), move[key])
            moved[key] = make_tensor(array, Aval.contiguous(tuple(tensor.shape), tensor.dtype))
        return moved[key]

    if move:
        module._apply(to_its_place)
    return module


# -- making ----------------------------------------------------------------------------------------


def make_in_shards(
    module: torch.nn.Module, shardings: dict[str, Any], make: Callable[[], dict[str, torch.Tensor]]
) -> torch.nn.Module:
    """Give tensors of a module on "meta" their values: those of `make()`, by name, computed in their parts by one program."""

    def program() -> dict[str, torch.Tensor]:
        made = make()
        return {name: made[name].detach() for name in shardings}

    tensors = named_tensors(module)
    values = {id(tensors[name]): value for name, value in jax_jit(program, {"out_shardings": shardings})().items()}
    module._apply(lambda tensor: values.get(id(tensor), tensor) if tensor.device.type == "meta" else tensor)
    for _, members, attribute in tensor_places(module):  # those that are neither parameters nor buffers
        if members[attribute].device.type == "meta":
            members[attribute] = values.get(id(members[attribute]), members[attribute])
    return module


def _initialised(module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None) -> dict[str, torch.Tensor]:
    """Values for what a module has on "meta": its own initialisation, run on tensors that have an array."""
    init = init or getattr(module, "_init_weights", None) or _reset
    places = [(name, members, key, members[key]) for name, members, key in tensor_places(module)]
    empty: dict[int, torch.Tensor] = {}
    for _, _, _, old in places:
        if old.device.type == "meta" and id(old) not in empty:
            new = torch.empty_like(old, device="jax")
            is_parameter = isinstance(old, torch.nn.Parameter)
            empty[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
    unwritten = {key: _state(tensor) for key, tensor in empty.items()}
    wanted = {id(part) for part in module.modules() if any(id(t) in empty for t in named_tensors(part).values())}
    try:
        for _, members, key, old in places:
            members[key] = empty.get(id(old), old)
        with torch.no_grad():
            module.apply(lambda part: init(part) if id(part) in wanted else None)
        made = {name: (id(old), members[key]) for name, members, key, old in places if id(old) in empty}
    finally:
        for _, members, key, old in places:
            members[key] = old
    left = [name for name, (old, new) in made.items() if _state(new) == unwritten[old]]
    if left:
        raise ValueError(
            f"shard_module: {', '.join(left)} on device 'meta' got no values from {getattr(init, '__qualname__', init)}. Give an "
            "`init` that makes them, or, if it is the constructor that does, let it run in parts too: "
            "`torchax_core.mesh_util.Mesh(mesh, rules).initialize_model_sharded(Class, args)`."
        )
    return {name: new for name, (_, new) in made.items()}


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after each write."""
    tensor.jax()  # type: ignore[attr-defined] # a trace that meets a tensor writes to its storage
    return id(tensor._store), tensor._store.version  # type: ignore[attr-defined]


def _reset(part: torch.nn.Module) -> None:
    """What torch's own modules call in their constructors."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(part, name):
            getattr(part, name)()

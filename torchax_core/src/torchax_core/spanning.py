"""Programs of several processes: a function that each of them traces, with collectives between them, run as one program.

A pack that knows of groups of processes says who is in them (`register`). While a function is traced, their members are
positions along mesh axes, and a collective is one of JAX's over these (`join`); what was traced then runs on every process's
device, in a jax.shard_map over a mesh of them. Each process traces for itself, so that Python values may differ between them,
as ranks do; that all will meet in the same collectives is checked before the program is compiled.

Source: https://docs.jax.dev/en/latest/multi_process.html
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax.sharding import Mesh, NamedSharding

from torchax_core.collective_order import collectives_in, in_turn, one_by_one
from torchax_core.errors import CollectiveError
from torchax_core.tensor import active

__all__ = ["Group", "Span", "SpanningProgram", "axis_env", "group_of", "join", "register", "span_of"]


class Group:
    """Processes that talk to each other. devices: one of each, in the order of ranks; rank: this process's.

    store: a torch.distributed store that all of them share.
    """

    def __init__(self, devices: Sequence[Any], rank: int, store: Any) -> None:
        self.devices = tuple(devices)
        self.rank = rank
        self.store = store
        self._agreed: set[str] = set()
        self._told = 0
        self._met = False

    def tell(self, what: str) -> list[str]:
        """What every member tells while it traces, in the order of ranks. All must, in the same order.

        Raises CollectiveError if one does not come, in the time that the group was given for its collectives.
        """
        key = f"torchax/told {self._told}"
        self._told += 1
        self.store.set(f"{key} by {self.rank}", what)
        keys = [f"{key} by {rank}" for rank in range(len(self.devices))]
        try:
            self.store.wait(keys)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {len(keys)} traces a jitted function with collectives, and some others did not come to do "
                f"the same ({error}). Every member of a group must call the same jitted functions in the same order, and trace "
                "them anew at the same calls."
            ) from error
        return [self.store.get(key).decode() for key in keys]

    def meet(self) -> None:
        """Wait until every member is about to run the group's first collective, in which gloo waits for half a minute only."""
        if not self._met:
            self.tell("here")
            self._met = True

    def agree(self, name: str, collectives: Sequence[str], compile: Callable[[], Any]) -> None:
        """Wait until every member has compiled a program with these collectives, once for each list of them.

        Raises CollectiveError if another has other ones, which would wait for each other for ever.
        """
        said = hashlib.sha256("\n".join(collectives).encode()).hexdigest()
        if said in self._agreed:
            return
        summary = f"{said} {len(collectives)} collectives: {'; '.join(collectives)}"
        others = self.tell(summary[:4000])
        for rank, other in enumerate(others):
            if other.partition(" ")[0] != said:
                raise CollectiveError(
                    f"jit({name}): the members of a group must run the same collectives, but rank {self.rank} has traced "
                    f"{summary.partition(' ')[2][:600]}, and rank {rank} {other.partition(' ')[2][:600]}. Let what is sent not "
                    "depend on the rank."
                )
        compile()
        self.tell("compiled")  # programs take unequally long; and see `meet`
        self._agreed.add(said)


_groups: dict[tuple[Any, ...], Group] = {}
_scope: tuple[int, list[tuple[str, int]], dict[tuple[Any, ...], tuple[str, ...]]] = (0, [], {})


def group_of(devices: Sequence[Any]) -> Group:
    """The group of these processes."""
    return _groups[tuple(devices)]


def register(group: Group) -> None:
    """Let collectives among these processes be part of jitted functions. Called by every member, in the same order."""
    _groups.pop(group.devices, None)  # one that was destroyed
    _groups[group.devices] = group


def _axes() -> tuple[list[tuple[str, int]], dict[tuple[Any, ...], tuple[str, ...]]]:
    """The mesh axes that groups are, and their sizes; and for each group its axes, the slowest first.

    Ranks start, start + t, ..., start + (s - 1) t are an axis of the world laid out as (..., s, t): such groups, as a DeviceMesh
    makes them, fit into one mesh if each t divides the next. Any other is an axis of its own.
    """
    global _scope
    if _scope[0] == len(_groups) and all(devices in _scope[2] for devices in _groups):
        return _scope[1], _scope[2]
    world = max(_groups, key=len)
    place = {device: i for i, device in enumerate(world)}
    cuts, fitting = [1, len(world)], {}
    for devices in _groups:
        ranks = [place.get(device, -1) for device in devices]
        step, size = (ranks[1] - ranks[0] if min(ranks) >= 0 else 0), len(ranks)
        regular = step > 0 and ranks == list(range(ranks[0], ranks[0] + step * size, step))
        new = sorted({*cuts, step, step * size})
        if regular and ranks[0] % (step * size) < step and _divide(new):
            cuts = new
            fitting[devices] = (step, step * size)
    strides = [(low, high // low) for low, high in zip(cuts, cuts[1:], strict=False)][::-1]
    names = {low: f"processes_{low}" for low, _ in strides}
    env = [(names[low], size) for low, size in strides]
    axes: dict[tuple[Any, ...], tuple[str, ...]] = {}
    for number, devices in enumerate(_groups):
        if devices in fitting:
            first, last = fitting[devices]
            axes[devices] = tuple(names[low] for low, _ in strides if first <= low < last)
        else:
            axes[devices] = (f"group_{number}",)
            env.append((f"group_{number}", len(devices)))
    _scope = (len(_groups), env, axes)
    return env, axes


def _divide(cuts: list[int]) -> bool:
    return all(high % low == 0 for low, high in zip(cuts, cuts[1:], strict=False))


def axis_env() -> list[tuple[str, int]]:
    """The axes that are in scope while a function is traced: `axis_env` of jax.make_jaxpr. Empty in a program of one process."""
    return _axes()[0] if _groups else []


def join(devices: Sequence[Any], op: str, collective: Callable[[Any, Any], Any], arrays: Any) -> Any:
    """`collective(arrays, axes)` as part of the trace under way, `axes` being those that these processes are.

    Raises CollectiveError if what is traced does not become a program of several processes.
    """
    trace = active.trace
    while getattr(trace, "parent", None) is not None:  # a jax transformation inside the trace
        trace = trace.parent  # type: ignore[union-attr]
    groups = getattr(trace, "groups", None)
    if groups is None and _making.now:  # a torch.autograd.Function's backward, in that of a jitted function
        groups = set()
    if groups is None:
        raise CollectiveError(
            f"{op}: a collective between processes can be part of a function under torchax_core.jit or torch.compile, but not of "
            "one under jax's own jit, grad or vmap, nor of an exported one, which is this process's own. Call it outside, or run "
            "one program over all processes' devices: jax.shard_map over a mesh of jax.devices(), and torchax_ops_c10d.map_group."
        )
    groups.add(tuple(devices))
    # JAX takes what is no tracer to be the same in all processes: its sum would be a multiple, without any sending
    traced = jax.tree.map(lambda x: x if isinstance(x, jax.core.Tracer) else jax.lax.optimization_barrier(x), arrays)
    return collective(traced, _axes()[1][tuple(devices)])


# -- what was traced -----------------------------------------------------------------------------


def span_of(name: str, jaxpr: Any, groups: set[tuple[Any, ...]]) -> Span | None:
    """Over which processes a traced function is to run; None: it is this process's alone.

    groups: those that joined while it was traced.
    """
    env = axis_env()
    used = {axis for _, axes in collectives_in(jaxpr.jaxpr, dict(env)) for axis in axes} if env else set()
    if not used:
        return None
    axes, whole = _axes()[1], max(_groups, key=len)
    group = next(iter(groups)) if len(groups) == 1 else whole
    if not used <= set(axes[group]):
        group = whole
    if not used <= set(axes[group]):
        raise CollectiveError(
            f"jit({name}): its collectives are among groups that are not the rows and columns of one mesh of processes. Make the "
            "groups by torch.distributed.device_mesh.init_device_mesh, or call the jitted parts one by one."
        )
    return Span(name, _groups[group], [(axis, size) for axis, size in env if axis in axes[group]])


class Span:
    """The processes that run one program."""

    def __init__(self, name: str, group: Group, axes: list[tuple[str, int]]) -> None:
        self.name = name
        self.group = group
        self.axes = axes
        shape = tuple(size for _, size in axes)
        self.mesh = Mesh(np.array(group.devices).reshape(shape), tuple(axis for axis, _ in axes))
        self.device = group.devices[group.rank]
        self.each = NamedSharding(self.mesh, jax.P(self.mesh.axis_names))

    @functools.cached_property
    def start(self) -> jax.Array:
        """What a program's first collective waits for (collective_order.py): int32 of shape (members,), a zero on each device."""
        zero = jax.device_put(np.zeros(1, np.int32), self.device)
        return jax.make_array_from_single_device_arrays((len(self.group.devices),), self.each, [zero])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash(self.mesh)

    def compile(self, fn: Callable[..., Any], donate: tuple[int, ...] = (), jaxpr: Any = None) -> SpanningProgram:
        """The function of this process's arrays, to be run by all processes at once. jaxpr: its, if it is known."""
        return SpanningProgram(self, fn, donate, jaxpr)


class _Making(threading.local):
    """now: whether this thread traces a function that is known to become a program of several processes."""

    now = False


_making = _Making()


@dataclasses.dataclass
class _Made:
    """A program for arguments of one structure. collectives: in words; agreed: all processes have the same ones."""

    run: Any
    results: Any
    collectives: list[str]
    agreed: bool = False


class SpanningProgram:
    """A function of arrays (pytrees of them) that several processes run together, each on its own.

    Also what placement.Placed is: compiled for results that lie anywhere, which here is on this process's device.
    """

    def __init__(self, span: Span, fn: Callable[..., Any], donate: tuple[int, ...], jaxpr: Any) -> None:
        self.span = span
        self.fn = fn
        self.donate = donate
        self.jaxpr = jaxpr
        self.sharding = NamedSharding(span.mesh, jax.P())
        self._made: dict[Any, _Made] = {}
        self._here = jax.sharding.SingleDeviceSharding(span.device)

    @property
    def anywhere(self) -> SpanningProgram:
        return self

    def laid_out(self, shardings: tuple[Any, ...]) -> SpanningProgram:
        """Itself. Raises CollectiveError if results are to lie on several devices."""
        for sharding in shardings:
            if sharding is not None:
                raise self._refusal(sharding)
        return self

    def __call__(self, *args: Any) -> Any:
        made, arrays = self._prepared(args)
        if not made.agreed:
            self.span.group.agree(self.span.name, made.collectives, lambda: self._lowered(made, arrays).compile())
            made.agreed = True
        results = in_turn(self.span.device, lambda: made.run(self.span.start, *arrays))
        return made.results.unflatten([array.addressable_data(0) for array in results])

    def lower(self, *args: Any) -> Any:
        """As jax's; runs nothing."""
        return self._lowered(*self._prepared(args))

    def _lowered(self, made: _Made, arrays: list[Any]) -> Any:
        return made.run.lower(self.span.start, *arrays)

    def _prepared(self, args: tuple[Any, ...]) -> tuple[_Made, list[Any]]:
        leaves, structure = jax.tree.flatten(args)
        # cotangents of integers, which are no arrays
        nothing = {i: a for i, a in enumerate(leaves) if getattr(a, "dtype", None) == jax.dtypes.float0}
        arrays = [a for i, a in enumerate(leaves) if i not in nothing] if nothing else leaves
        key = (structure, *((i, a.shape) for i, a in nothing.items()))
        if self.jaxpr is None:
            key = (*key, *((a.shape, a.dtype) for a in arrays))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(structure, nothing, arrays)
        return made, [*map(self._everybodys, arrays)]

    def _make(self, structure: Any, nothing: dict[int, Any], arrays: list[Any]) -> _Made:
        found: list[Any] = []

        def flat(*arrays: Any) -> Any:
            given = iter(arrays)
            leaves = [nothing[i] if i in nothing else next(given) for i in range(structure.num_leaves)]
            results, tree = jax.tree.flatten(self.fn(*structure.unflatten(leaves)))
            found.append(tree)
            return results

        jaxpr = self.jaxpr
        if jaxpr is None:
            before, _making.now = _making.now, True
            try:
                jaxpr = jax.make_jaxpr(flat, axis_env=self.span.axes)(*arrays)
            finally:
                _making.now = before
        else:
            found.append(jax.tree.structure([0] * len(jaxpr.out_avals)))
        ours = dict(self.span.axes)
        run = jec.jaxpr_as_fun(one_by_one(jaxpr, ours))

        def step(start: Any, *arrays: Any) -> Any:
            *results, last = run(start.reshape(()), *arrays)
            return results, last

        step.__name__ = getattr(self.fn, "__name__", "step")
        # Each process's values are its own. Said to be everybody's, they need no axis to be told apart by, and nobody looks.
        specs = (self.span.each.spec, *[jax.P()] * len(jaxpr.in_avals))
        whole = jax.shard_map(step, mesh=self.span.mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
        collectives = [what for what, _ in collectives_in(jaxpr.jaxpr, ours)]
        donated = tuple(i + 1 for i in self.donate)
        return _Made(jax.jit(whole, donate_argnums=donated), found[0], collectives)

    def _everybodys(self, array: Any) -> Any:
        """This process's array as its part of one that all of them have."""
        if not isinstance(array, jax.Array):
            array = jax.device_put(array, self._here)
        elif array.sharding != self._here:
            if len(array.sharding.device_set) > 1:
                raise self._refusal(array.sharding)
            array = jax.device_put(array, self._here)
        return jax.make_array_from_single_device_arrays(array.shape, self.sharding, [array])

    def _refusal(self, sharding: Any) -> CollectiveError:
        return CollectiveError(
            f"jit({self.span.name}): it has collectives between processes, each of which takes part with one device, but one of "
            f"its arrays is laid out over {len(sharding.device_set)} devices: {sharding}. Start one process a device, or lay "
            "everything out over a mesh of all processes' devices (shard_module, distribute_tensor): XLA finds what to send."
        )

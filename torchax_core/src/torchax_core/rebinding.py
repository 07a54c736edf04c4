"""What a traced function did to places that hold tensors (places.py), to be done again by every call of its program.

    self.hidden = self.hidden * 0.5 + x

The tensor that `self.hidden` held is an input of the program, read from there at each call; what the function has put there is
an output, and each call puts a new tensor with its values there. A place that the function only read is guarded: if it
holds another tensor later, the function is traced anew. If it is then seen to take up that tensor, its next program reads
the place at each call; if it goes on with the old one, which it has from elsewhere, the place is not looked at any more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchax_core.arguments import flatten, opened, unflatten
from torchax_core.convert import is_traced
from torchax_core.freeing import Freed
from torchax_core.places import ABSENT, Place, reachable, set_items
from torchax_core.reached import look
from torchax_core.reads import Names
from torchax_core.tensor import Aval, Tensor, make_tensor
from torchax_core.values import ChangedValue, Values
from torchax_core.wrapped import like, parts

__all__ = ["Output", "Rebinding"]


class Output:
    """A new tensor over output number `at` of the program, like the one that was made while tracing."""

    __slots__ = ("at", "aval", "history", "leaf", "parameter")

    def __init__(self, at: int, tensor: Tensor, aval: Aval) -> None:
        self.at = at
        self.aval = aval
        self.parameter = isinstance(tensor, torch.nn.Parameter)
        self.leaf = tensor.requires_grad and tensor.is_leaf
        self.history = tensor.requires_grad and not tensor.is_leaf

    def make(self, output: Any) -> Any:
        """The tensor over this array; or this tensor, without its history if it is to have none."""
        tensor = output if isinstance(output, Tensor) else make_tensor(output, self.aval)
        if tensor.requires_grad and not self.history:
            tensor = tensor.detach()
        if self.parameter:
            return torch.nn.Parameter(tensor, requires_grad=self.leaf)
        return tensor.requires_grad_() if self.leaf else tensor


class _Source:
    """A tensor that a place held when the function was called."""

    __slots__ = ("captured", "current", "like", "number", "place")

    def __init__(self, place: Place, tensor: torch.Tensor, number: int) -> None:
        self.place = place
        self.current = tensor
        self.like = like(tensor)
        self.number = number
        self.captured = False


class _Argument:
    """The tensor that is the caller's argument at this position among the leaves."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: int) -> None:
        self.leaf = leaf


class Habits:
    """Names of places that a function is known to read from, and of those that it is known not to."""

    def __init__(self) -> None:
        self.read: set[Any] = set()
        self.unread: set[Any] = set()

    def learn(self, changes: Changes, captured: Callable[[torch.Tensor], bool], same: bool) -> None:
        """From what made a program unfit. captured: what the new program has for inputs; same: whether it is that program."""
        if same:
            self.unread |= {value.name for value in changes.values if not value.read}
        for place, old in changes.tensors:
            now = place.read()
            if isinstance(now, torch.Tensor) and captured(now):
                self.read.add(place.name)
            elif captured(old):
                self.unread.add(place.name)


class Changes:
    """Why programs did not fit: places that held other tensors, and values that were others."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Place, torch.Tensor]] = []
        self.values: list[ChangedValue] = []

    def add(self, rebinding: Rebinding) -> None:
        """Take up what has changed since a program was traced."""
        self.tensors += rebinding.moved()
        self.values += rebinding.values.changed()


class Rebinding:
    """The places reachable from a function's roots, before it is traced, and what became of them."""

    def __init__(self, roots: Iterable[Any], habits: Habits) -> None:
        self.roots = list(roots)
        self.habits = habits
        self.before = reachable(self.roots)
        self.sources: list[_Source] = []
        self.effects: list[tuple[Place, Any, Any, list[Any]]] = []  # place, what was there, structure, leaves
        self.guarded: list[tuple[Place, torch.Tensor]] = []

    # -- when traced -----------------------------------------------------------------------------

    def changed_number(self) -> str:
        """A number that the function changed, in words; empty if there is none."""
        for place, value in self.before.numbers:
            now = place.read()
            if now.__class__ is value.__class__ and now != value:
                return f"{place.key} from {value} to {now}"
        return ""

    def changed_elsewhere(self) -> str:
        """A tensor of another device that the function wrote to, in words; empty if there is none."""
        self.versions = [(t, version) for t, version in self.before.elsewhere if t._version != version]
        for tensor, _ in self.versions:
            return f"a tensor on {tensor.device} of shape {tuple(tensor.shape)}"
        return ""

    def note(self, arguments: dict[int, int], captured: Callable[[torch.Tensor], bool], kept: bool, out: Any) -> None:
        """Compare with what was.

        arguments: the position among the leaves, by identity of the tensor that stood for it.
        captured:  whether the program has the tensor for an input.
        kept:      whether tensors made inside are alive, apart from results.
        out:       makes an output of the program of a tensor.
        """
        before = self.before.tensors
        moved = any(place.read() is not tensor for place, tensor in before.values())
        moved = moved or any(len(items) != len(copy) for items, copy in self.before.lists.values())
        now = reachable(self.roots) if moved or kept else self.before
        after = now.tensors
        changed: dict[Any, Place] = {}
        for name in {**before, **after}:
            if name not in before or name not in after or before[name][1] is not after[name][1]:
                if name in after and _given_back(after[name][1]):
                    continue  # it has no values: it stays there, and no call has to put it there again
                place = now.where_new((after.get(name) or before[name])[0], self.before)
                changed.setdefault(place.name, place)
        lists = {id(p.container): p.container for p in changed.values() if p.kind is list}
        for key, items in lists.items():  # the items of a list change together
            for i in range(max(len(items), len(self.before.lists.get(key, ((), ()))[1]))):
                changed.setdefault((key, i), Place(items, i, list))
        self._changed = set(changed)
        self._changed_containers = {id(place.container) for place in changed.values()}
        self._sources(changed, captured)
        known = {id(s.current): s for s in self.sources}
        for place in sorted(changed.values(), key=lambda p: p.key if p.kind is list else 0):
            structure, leaves = self._after(place.read(), known, arguments, captured, out)
            self.effects.append((place, self.before.value_at(place), structure, leaves))
        for name, (place, tensor) in before.items():
            if name not in self.habits.unread and place.root().name not in changed and captured(tensor):
                if name in self.habits.read:
                    self._add_source(place, tensor, captured)
                else:
                    self.guarded.append((place, tensor))

    def _sources(self, changed: dict[Any, Place], captured: Callable[[torch.Tensor], bool]) -> None:
        for place, tensor in self.before.tensors.values():
            if place.root().name in changed:
                self._add_source(place, tensor, captured)

    def _add_source(self, place: Place, tensor: torch.Tensor, captured: Callable[[torch.Tensor], bool]) -> None:
        source = _Source(place, tensor, len(self.sources))
        source.captured = captured(tensor)
        self.sources.append(source)

    def _after(
        self,
        value: Any,
        known: dict[int, _Source],
        arguments: dict[int, int],
        captured: Callable[[torch.Tensor], bool],
        out: Any,
    ) -> tuple[Any, list[Any]]:
        def opens(value: Any, parent: Any) -> bool:  # a DTensor that was there before stays what it is
            return opened(value) and not (isinstance(value, torch.Tensor) and (id(value) in known or captured(value)))

        leaves: list[Any] = []
        structure = flatten(value, leaves, None, opens)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) in known:
                leaves[i] = known[id(leaf)]
            elif not isinstance(leaf, Tensor):
                continue
            elif id(leaf) in arguments:
                leaves[i] = _Argument(arguments[id(leaf)])
            elif is_traced(leaf._store.array) and not captured(leaf):  # state stays the tensor that it is
                leaves[i] = out(leaf)
        return structure, leaves

    def restore(self) -> None:
        """Put back what was there before the function was traced."""
        for place, value, _, _ in reversed(self.effects):
            place.write(value)
        for key in {id(place.container) for place, *_ in self.effects if place.kind is list}:
            if key in self.before.lists:
                set_items(*self.before.lists[key])

    def abandon(self) -> None:
        """Put back what was there before a trace that failed."""
        before, after = self.before.tensors, reachable(self.roots).tensors
        for name, (place, tensor) in after.items():
            if name not in before and place.kind is dict and _traced(tensor):
                place.write(ABSENT)
        for place, tensor in before.values():
            if place.read() is not tensor:
                root = place.root()
                root.write(self.before.value_at(root))
        for place, number in self.before.numbers:
            if place.read() is not number:
                place.write(number)
        for items, copy in self.before.lists.values():
            if any(isinstance(item, Tensor) for item in (*items, *copy)):
                set_items(items, copy)

    # -- at each call ----------------------------------------------------------------------------

    def compile(self, skip: set[int], modules: Iterable[Any], ran: Iterable[Any]) -> None:
        """Lay the guards out in columns. `skip`: containers that are guarded already; `modules`, `ran`: those that ran, and
        the code that did."""
        left = [(p, t) for p, t in self.guarded if id(p.container) not in skip]
        links, lengths = self.before.way_to([*(p for p, _ in self.guarded), *(s.place for s in self.sources)])
        self.links = [(p, v) for p, v in links if p.root().name not in self._changed and id(p.container) not in skip]
        self.lengths = [(c, n) for c, n in lengths if id(c) not in self._changed_containers and id(c) not in skip]
        entries: list[tuple[Place, Any]] = [(p, t) for p, t in [*left, *self.links] if p.kind is dict]
        self.containers, self.keys = [p.container for p, _ in entries], [p.key for p, _ in entries]
        self.tensors = [t for _, t in entries]
        self.others: list[tuple[Place, Any]] = [(p, t) for p, t in [*left, *self.links] if p.kind is not dict]
        self.counted, self.counts = [c for c, _ in self.lengths], [n for _, n in self.lengths]
        roots = [(f"root {i}", root) for i, root in enumerate(self.roots)]
        written, containers = self.before.changed_since()  # by Python side effects, which are warned of
        rebound, changed = self._changed | written, self._changed_containers | containers
        find = functools.partial(look, roots, Names(ran), list(modules), rebound, changed)
        self.values = Values(find, self.habits.unread)
        del self.before  # it holds what may be gone by the next call, and is to be noticed then (guards.py)

    def holds(self) -> bool:
        """Whether the places that the program only reads hold the tensors they held."""
        return (
            all(map(operator.is_, map(dict.get, self.containers, self.keys), self.tensors))
            and [*map(len, self.counted)] == self.counts
            and all(place.read() is value for place, value in self.others)
            and not self.versions
            and self.values.hold()
        )

    def what_moved(self) -> str:
        """In words, what does not hold; empty if all does."""
        for place, tensor in self.moved():
            return f"{place} held a tensor of shape {tuple(tensor.shape)}, and holds another or none now"
        for place, value in self.links:
            if place.read() is not value:
                return f"{place} held a {type(value).__name__}, and holds {_short(place.read())} now"
        for what in self.values.changed():
            return str(what)
        if self.versions:
            return "the function writes to a tensor that is not on device 'jax'"
        for container, count in self.lengths:
            if len(container) != count:
                return f"a {type(container).__name__} with state had {count} items, and has {len(container)} now"
        return ""

    def moved(self) -> list[tuple[Place, torch.Tensor]]:
        """Those that do not, and what they held."""
        return [(place, tensor) for place, tensor in self.guarded if place.read() is not tensor]

    def held(self) -> set[int]:
        """The identities of the tensors that the places hold."""
        return {id(tensor) for _, tensor in self.guarded} | {id(source.current) for source in self.sources}

    def follow(self, replace: Callable[[list[tuple[Tensor, Tensor]]], bool]) -> str:
        """Take up the tensors that the sources hold now: `replace` old ones by new ones; in words, what makes that impossible."""
        for place, value, _, _ in self.effects:
            if not any(isinstance(leaf, Tensor) for leaf in _leaves(value)) and not _like(place.read(), value):
                return f"{place} held {_short(value)}, and holds {_short(place.read())} now"
        taken: dict[int, Any] = {}
        for source in self.sources:
            tensor, old = source.place.read(), source.current
            if taken.setdefault(id(old), tensor) is not tensor:
                return f"{source.place} held what another place holds, too, and does no more"
            if tensor is old:
                continue
            if like(tensor) != source.like or _traced(tensor):
                return f"{source.place} held {_short(old)}, and holds {_short(tensor)} now"
        done: dict[int, torch.Tensor] = {}
        for source in self.sources:
            tensor, old = source.place.read(), source.current
            if tensor is not old:
                pairs = [*zip(parts(old), parts(tensor), strict=True)]
                if source.captured and id(old) not in done and not replace(pairs):
                    return f"{source.place} holds a tensor that is state of the function in some other way, too"
                source.current, done[id(old)] = tensor, old
        return ""

    def write(self, outputs: Any, leaves: list[Any]) -> None:
        """Do to the places what the function did."""
        held = [source.current for source in self.sources]
        for place, _, structure, leaves_then in self.effects:
            values = [
                part.make(outputs[part.at])
                if part.__class__ is Output
                else held[part.number]
                if part.__class__ is _Source
                else leaves[part.leaf]
                if part.__class__ is _Argument
                else part
                for part in leaves_then
            ]
            place.write(unflatten(structure, iter(values)))


def _traced(tensor: torch.Tensor) -> bool:
    return any(is_traced(part._store.array) for part in parts(tensor))


def _given_back(tensor: torch.Tensor) -> bool:
    return all(isinstance(part._store.array, Freed) for part in parts(tensor))


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(value, leaves)
    return leaves


def _like(now: Any, before: Any) -> bool:
    return now is before or (now.__class__ is before.__class__ and isinstance(now, (int, float, str)) and now == before)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value._aval}{', requires grad' if value.requires_grad else ''}"
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return " ".join(repr(value).split())[:60]

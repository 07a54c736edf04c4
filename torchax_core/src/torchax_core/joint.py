"""The backward of a jitted function whose results want gradients, as torch makes it.

Together with the function torch's autograd is traced, from cotangents of its outputs to gradients of its inputs: the formulas
are torch's, as in eager code and as where `backward` is called inside. The jaxpr is then taken apart: what the outputs need is
the forward; the rest, its values beside them, the backward, and what this takes from the forward is saved between the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import torch

from torchax_core.tensor import Aval, Storage, Tensor, make_tensor
from torchax_core.vjp import DifferentiableProgram, Residuals, x64_of

if TYPE_CHECKING:
    from torchax_core.trace import Trace

__all__ = ["Backward", "JointProgram"]


class Backward:
    """The backward of one traced function, traced with it.

    outputs:   the numbers of the outputs that have a cotangent.
    inputs:    the storages whose gradients it gives, all that want one; in the order of the program's inputs at last.
    gradients: for each of them the traced gradient, None where the outputs do not depend on it; or None, where torch's
               backward cannot be traced.
    """

    def __init__(self, outputs: list[int], cotangents: list[Any], inputs: list[Storage], gradients: Any) -> None:
        self.outputs = outputs
        self.cotangents = cotangents
        self.inputs = inputs
        self.gradients: list[Any] | None = gradients
        self.wanted: tuple[int, ...] = ()
        self._halves: Halves | None = None

    @classmethod
    def of(cls, trace: Trace, arguments: Sequence[Tensor], histories: dict[int, Tensor]) -> Backward | None:
        """Trace torch's backward, at the end of a trace. None unless each input that wants gradients is one tensor.

        arguments: the function's, as the trace has them. histories: outputs that have a history, by their numbers.
        """
        state = [
            (tensor, store)
            for tensor, store in trace.tensors.values()
            if id(store) in trace.lifted and id(tensor) not in trace.aliases and tensor.requires_grad
        ]
        stores = [id(t._store) for t in arguments] + [id(store) for _, store in state]
        if trace.torch_only or len(set(stores)) != len(stores) or any(t.__class__ is not Tensor for t, _ in state):
            return None
        outputs = [at for at, tensor in histories.items() if jnp.issubdtype(tensor._array().dtype, jnp.inexact)]
        cotangents = [trace.placeholder(jax.typeof(histories[at]._array())) for at in outputs]
        wanting = [(t, t._store) for t in arguments if t.requires_grad] + state
        found = _gradients([histories[at] for at in outputs], cotangents, [t for t, _ in wanting])
        return cls(outputs, cotangents, [store for _, store in wanting], found)

    def in_order(self, positions: dict[int, int]) -> list[Any]:
        """The gradients there are, in the order of the program's inputs, whose positions are given by the storages' identity."""
        if self.gradients is None:
            return []
        found = sorted((positions[id(store)], n) for n, store in enumerate(self.inputs))
        self.wanted = tuple(position for position, _ in found)
        self.inputs = [self.inputs[n] for _, n in found]
        self.gradients = [self.gradients[n] for _, n in found]
        return [g for g in self.gradients if g is not None]

    def split_from(self, closed: Any, bound: dict[int, int]) -> Any:
        """The function alone, of a jaxpr whose last outputs are the gradients. bound: the placeholders' numbers among its last
        inputs, by identity."""
        first = len(closed.jaxpr.invars) - len(bound)
        cotangents = [first + bound[id(c)] for c in self.cotangents]
        self._halves = Halves(closed, cotangents, sum(g is not None for g in self.gradients or ()))
        return self._halves.alone

    def program(self, compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> JointProgram | None:
        """The function and this backward as one program; None where torch's backward could not be traced."""
        if self.gradients is None or self._halves is None:
            return None
        has = [g is not None for g in self.gradients]
        return JointProgram(self._halves, self.outputs, self.wanted, has, compile)


def _gradients(outputs: list[Tensor], cotangents: list[Any], inputs: list[Tensor]) -> list[Any] | None:
    """Traced gradients of the inputs; None where a formula depends on values, or what it needs was written to."""
    given = [make_tensor(c, Aval.contiguous(tuple(t.shape), t.dtype)) for t, c in zip(outputs, cotangents, strict=True)]
    try:
        with _without_hooks(inputs), torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    except Exception:  # of a call that may ask for no gradients; jax's own, if it does, fails there or knows a way
        return None
    if not all(g is None or isinstance(g, Tensor) for g in found):
        return None
    return [None if g is None else g._array() for g in found]


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the tensors' own hooks away: torch calls those when the gradients that the program computes arrive."""
    held = [(hooks, dict(hooks)) for t in tensors if (hooks := t._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in held:
            hooks.update(items)


class Halves:
    """A jaxpr of outputs and gradients, taken apart.

    forward:  inputs -> outputs, then what is saved.
    backward: what is saved, then cotangents -> gradients.
    alone:    inputs -> outputs.
    saved:    for each value saved the input that it is, or None.
    """

    def __init__(self, closed: Any, cotangents: Sequence[int], count: int) -> None:
        jaxpr = closed.jaxpr
        outputs = len(jaxpr.outvars) - count
        given = [jaxpr.invars[i] for i in cotangents]
        inputs = [v for i, v in enumerate(jaxpr.invars) if i not in set(cotangents)]
        results, gradients = jaxpr.outvars[:outputs], jaxpr.outvars[outputs:]
        known = {*jaxpr.constvars, *inputs}
        after = set(given)  # depends on a cotangent
        for eqn in jaxpr.eqns:
            if any(v in after for v in _variables(eqn.invars)):
                after.update(eqn.outvars)
        forward = _needed(
            jaxpr.eqns, results, lambda eqn: bool(eqn.effects) and not any(v in after for v in eqn.outvars)
        )
        taken = {id(eqn) for eqn in forward}
        rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
        backward = _needed(rest, gradients, lambda eqn: bool(eqn.effects))
        made = {v for eqn in backward for v in eqn.outvars} | set(given) | set(jaxpr.constvars)
        wanted = [v for eqn in backward for v in _variables(eqn.invars)] + [*_variables(gradients)]
        residuals = [*dict.fromkeys(v for v in wanted if v not in made)]
        places = {v: i for i, v in enumerate(inputs)}
        self.saved = [places.get(v) for v in residuals]
        kept = [v for v in residuals if v not in places]
        assert known.isdisjoint(after)
        self.alone = _closed(closed, inputs, results, forward)
        self.forward = _closed(closed, inputs, [*results, *kept], forward)
        self.backward = _closed(closed, [*residuals, *given], gradients, backward)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, jec.Literal)]


def _needed(eqns: Sequence[Any], results: Sequence[Any], always: Callable[[Any], bool]) -> list[Any]:
    """The equations that the results need, and those that are needed `always`, in order."""
    needed, kept = set(_variables(results)), []
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars) or always(eqn):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


def _closed(closed: Any, inputs: list[Any], results: list[Any], eqns: list[Any]) -> Any:
    jaxpr = closed.jaxpr
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    made = jaxpr.replace(invars=inputs, outvars=results, eqns=eqns, effects=effects)
    return jec.ClosedJaxpr(made, closed.consts)


class JointProgram(DifferentiableProgram):
    """A traced function with torch's own backward.

    outputs: the numbers of the outputs whose cotangents the backward takes.
    wanted:  the positions of the inputs whose gradients it computes, all that want one.
    has:     for each of them whether it has a gradient; the backward's results are of these.
    """

    def __init__(
        self,
        halves: Halves,
        outputs: list[int],
        wanted: tuple[int, ...],
        has: list[bool],
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        super().__init__(jec.jaxpr_as_fun(halves.alone), compile=compile)
        self.halves = halves
        self.outputs = outputs
        self.wanted = wanted
        self.has = has
        self.count = len(halves.alone.jaxpr.outvars)

    def _forward(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """The outputs, and what the backward takes of them and of the inputs."""
        found = jec.jaxpr_as_fun(self.halves.forward)(*arrays)
        kept = iter(found[self.count :])
        return tuple(found[: self.count]), [next(kept) if at is None else arrays[at] for at in self.halves.saved]

    def _backward(self, saved: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        found = iter(jec.jaxpr_as_fun(self.halves.backward)(*saved, *[cotangents[at] for at in self.outputs]))
        return tuple(next(found) if has else None for has in self.has)

    def made_for(self, wanted: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if wanted != self.wanted:  # forward-mode derivatives, or an argument that wants none in this call
            return super().made_for(wanted)
        pair = self._made.get(wanted)
        if pair is None:

            def forward(*arrays: Any) -> Any:
                with x64_of(self):
                    results, saved = self._forward(arrays)
                    return results, Residuals.of(saved, arrays)

            def backward(saved: Any, cotangents: Sequence[Any]) -> Any:
                with x64_of(self):
                    return self._backward(saved, cotangents)

            pair = self._made[wanted] = self.compiled(forward), self.compiled(backward)
        return pair

    def second(self, wanted: tuple[int, ...], count: int) -> DifferentiableProgram:
        if wanted != self.wanted:
            return super().second(wanted, count)
        program = self._seconds.get(wanted)
        if program is None:

            def backward_of(*values: Any) -> Any:
                arrays, given = values[:count], iter(values[count:])
                results, saved = self._forward(arrays)
                cotangents = [next(given) if jnp.issubdtype(r.dtype, jnp.inexact) else None for r in results]
                gradients = self._backward(saved, cotangents)
                return tuple(
                    jnp.zeros_like(arrays[at]) if g is None else g for at, g in zip(wanted, gradients, strict=True)
                )

            program = self._seconds[wanted] = self._derived(backward_of)
        return program

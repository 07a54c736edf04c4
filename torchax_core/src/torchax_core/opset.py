"""OpSet: how a pack says how ops run. Plain data; making one, or importing a module that does, changes nothing else.

    ops = OpSet("my_pack.pointwise")

    @ops.lowering("aten::add.Tensor", promote=SAME)
    def add(self, other, *, alpha=1):
        return self + alpha * other

Ops are named by string and looked up when first used, so a name that the installed torch lacks is no error: it is
listed by ``torchax ops --missing``. In-place and ``out=`` forms are never written: they follow from the op's schema.

What a definition's body receives is said at each decorator below.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torchax_core.errors import DuplicateOpError, OpNameError
from torchax_core.promotion import KEEP, Promotion

__all__ = [
    "AUTOCAST_POLICIES",
    "AutocastRule",
    "Definition",
    "OpSet",
    "Origin",
    "ValueCheck",
    "ViewDefinition",
    "ViewRules",
]

Kind = Literal["lowering", "decomposition", "view", "function"]
GradSource = Literal["vjp", "decompose", "formula"]
CompositeGrad = GradSource | Callable[..., GradSource]
Strides = Callable[[tuple[int, ...], Mapping[str, Any]], tuple[int, ...]]
F = TypeVar("F", bound=Callable[..., Any])

AUTOCAST_POLICIES = ("lower_precision_fp", "fp32", "promote")

_OP_NAME = re.compile(r"^(?P<namespace>\w+)::(?P<name>\w+)(\.(?P<overload>\w+))?$")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a definition was written: for `torchax explain`, and for every error that concerns it."""

    pack: str
    module: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.pack} ({self.file}:{self.line})"


@dataclasses.dataclass(frozen=True)
class DataDependentCase:
    """The calls of an op whose result shape depends on data, where most calls' does not (`x[mask]`, not `x[i]`).

    when:    takes the op's arguments as torch passes them, and tells whether this call is one: by shapes, dtypes and
             static values, which are all that a signature knows.
    body:    as the lowering's, but run unjitted on concrete arrays.
    instead: the bounded alternative to name in the error under jit.
    """

    when: Callable[..., bool]
    body: Callable[..., Any]
    instead: str


@dataclasses.dataclass(frozen=True)
class ValueCheck:
    """What torch refuses a call of an op for, of what is in its tensors: see :meth:`OpSet.value_check`."""

    refused: Callable[..., bool]
    values: frozenset[str]

    def wants(self, argument: str) -> bool:
        """Whether `refused` takes this argument of the op."""
        parameters = inspect.signature(self.refused).parameters
        return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@dataclasses.dataclass(eq=False)
class Definition:
    """How one op runs: the body, and what the kernel must know to call it.

    op:              "namespace::name" or "namespace::name.overload"; for `function`, a dotted name ("torch.einsum").
    kind:            what `body` is made of (see the decorators of :class:`OpSet`).
    promote:         the dtype promotion applied to the arguments before `body` runs.
    static:          names of Scalar/float arguments `body` must see as Python values (each value compiles anew).
    data_dependent:  None, or, for an op whose result shape depends on its data, the bounded alternative to name in the
                     error under jit. Its body runs unjitted on concrete arrays.
    positional:      `body` is a plain JAX function taking the arguments by position (rows of a table).
    composite_grad:  for a composite op kept whole, where its gradients come from.
    differentiable:  the op's gradients are jax.vjp's, as torch has no formula for it, or a very long one.
    whole:           a decomposition is traced and compiled as a whole; False: it runs call by call.
    depends_on:      a setting outside the call that `body` reads while traced; its value is part of every signature.
    case:            which calls of this op depend on data, if only some do.
    value_check:     what torch refuses a call for, of what is in its tensors.
    format_of:       names of tensor arguments whose memory format the results take.
    strides:         of the first result, if they are not what torch's meta kernel says.
    fills_out:       an `out` of another shape that has as many elements as the result keeps its shape.
    """

    op: str
    kind: Kind
    body: Callable[..., Any]
    origin: Origin
    promote: Promotion = KEEP
    static: frozenset[str] = frozenset()
    data_dependent: str | None = None
    positional: bool = False
    composite_grad: CompositeGrad = "vjp"
    differentiable: bool = False
    whole: bool = True
    depends_on: Callable[[], Any] | None = None
    case: DataDependentCase | None = None
    value_check: ValueCheck | None = None
    format_of: tuple[str, ...] = ()
    strides: Strides | None = None
    fills_out: bool = False

    def gradients_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GradSource:
        """Where the gradients of this call of a composite op come from."""
        source = self.composite_grad
        return source if isinstance(source, str) else source(*args, **kwargs)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The body's parameters by name (empty for a positional body)."""
        if self.positional:
            return {}
        return inspect.signature(self.body).parameters


class ViewRules:
    """How a view op reads, and how a write to the view reaches its base. What ``@ops.view`` returns.

    read:   the decorated function.
    split:  None, or `split(shape, *args) -> (static, traced)`: the op's arguments, made canonical for a base of that
            shape; `traced` ints do not compile anew when they change (the index of `select`, the start of a slice).
            `read` and `write` are then called as `read(base, *static, *traced)`.
    write:  None, or `write(base, new, *args) -> base`. Without it the write goes through an index map: the view is read
            from `arange(base.size)`, which gives the position of every element, and `new` is scattered there.
    bit:    torch keeps the op as a bit of the tensor, beside its geometry (conj, neg): a window on the memory of such a
            view (`as_strided`) has it too.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self.read = read
        self.split: Callable[..., tuple[tuple[Any, ...], tuple[int, ...]]] | None = None
        self.write: Callable[..., Any] | None = None
        self.bit = False

    def write_back(self, write: F) -> F:
        """Decorator: how a write reaches the base, for a view that does not keep elements whole, or more cheaply."""
        self.write = write
        return write

    def split_arguments(self, split: F) -> F:
        """Decorator: how the op's arguments divide into static and traced ones."""
        self.split = split
        return split

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read(*args, **kwargs)


@dataclasses.dataclass(eq=False)
class ViewDefinition(Definition):
    """A view op; `rules` is shared by all the names registered together."""

    rules: ViewRules = None  # type: ignore[assignment]  # always given; a default only because the base has defaults


@dataclasses.dataclass(frozen=True)
class AutocastRule:
    """Under `torch.autocast("jax", dtype=...)` these ops run in: that dtype, float32, or the widest of their inputs."""

    op: str
    policy: str
    origin: Origin


class OpSet:
    """A family of op definitions, usually one module's.

    name:       dotted, the pack's import name first ("torchax_ops_aten.pointwise"); shown by `torchax explain`.
    depends_on: a setting that the bodies read while traced (`torch.get_float32_matmul_precision`): when its value changes,
                they are traced anew.
    """

    def __init__(self, name: str, *, depends_on: Callable[[], Any] | None = None) -> None:
        self.name = name
        self.depends_on = depends_on
        self._definitions: dict[str, Definition] = {}
        self._autocast: dict[str, AutocastRule] = {}

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._definitions.values())

    def __len__(self) -> int:
        return len(self._definitions)

    def __repr__(self) -> str:
        return f"OpSet({self.name!r}, {len(self)} ops)"

    @property
    def autocast_rules(self) -> Iterable[AutocastRule]:
        """The autocast rules stated with :meth:`autocast`."""
        return self._autocast.values()

    # -- what packs write ------------------------------------------------------------------------

    def lowering(
        self,
        *ops: str,
        promote: Promotion = KEEP,
        static: Iterable[str] = (),
        data_dependent: str | None = None,
        composite_grad: CompositeGrad = "vjp",
        differentiable: bool = False,
        format_of: Iterable[str] = (),
        strides: Strides | None = None,
        fills_out: bool = False,
    ) -> Callable[[F], F]:
        """The op as a pure JAX function, compiled by jax.jit once per signature.

        The body's parameters carry the schema's names (a subset: `layout`, `device`, `pin_memory`, `memory_format`,
        `non_blocking` and `generator` may be left out). It receives

        - Tensor:    a jax array (with `promote`, in the common dtype); Tensor[]: a list of them; Tensor?: or None.
        - Scalar, float: a 0-d array in the dtype the tensors compute in, traced, so that no new value recompiles. Named
                     in `static`, or left to the schema's default: the Python value.
        - int, bool, int[], str: Python values, lists as tuples; ScalarType: a numpy dtype; all static.
        - a parameter `key` (`random_key` if the op has a `key` of its own) asks for a fresh jax.random key per call, the
          environment's or the `generator`'s; with the default None, only for calls that cannot do without.

        composite_grad: for an op that torch decomposes: gradients by jax.vjp of the body ("vjp"); or, for a call that wants
                   gradients, torch's decomposition ("decompose") or the formula torch has for the op, which calls its
                   `..._backward` ("formula": `linear`, `matmul` and a few more). Or a function of the call's arguments that
                   says which.

        differentiable: for an op whose derivative torch has not implemented, or only at a great length: gradients by jax.vjp
                   of the body.

        format_of: tensor arguments; results of four dims are channels_last if one of these is. For ops whose meta
                   kernels in torch give contiguous strides where its real ones do not.

        strides:   of the first result, where torch's meta kernel does not give those of its real kernels: a function of its
                   shape and the call's arguments by name, tensors as meta tensors (none, if the shape depends on data).

        fills_out: an `out` of another shape that has as many elements as the result is filled in order and keeps its shape.

        It returns an array, a tuple of arrays for several results, or a list for Tensor[]. Result dtypes are cast to
        those of torch's meta kernel; a result of another shape raises LoweringMismatchError. For a composite op it may
        return NotImplemented: torch then decomposes the call.
        """

        def register(body: F) -> F:
            for op in ops:
                self._add(
                    Definition(
                        op,
                        "lowering",
                        body,
                        self._origin(body),
                        promote=promote,
                        static=frozenset(static),
                        data_dependent=data_dependent,
                        composite_grad=composite_grad,
                        differentiable=differentiable,
                        format_of=tuple(format_of),
                        strides=strides,
                        fills_out=fills_out,
                    )
                )
            return body

        return register

    def table(self, promote: Promotion, rows: Mapping[str, Callable[..., Any]]) -> None:
        """Ops that are one JAX call each, under one promotion rule; called with the tensors and scalars by position."""
        origin = self._caller_origin()
        for op, body in rows.items():
            self._add(Definition(op, "lowering", body, origin, promote=promote, positional=True))

    def data_dependent_case(self, op: str, *, when: Callable[..., bool], instead: str) -> Callable[[F], F]:
        """Another body for those calls of an op, defined above in this set, whose result shape depends on data.

        See :class:`DataDependentCase`. Raises OpNameError if the set has no such op.
        """
        if op not in self._definitions:
            raise OpNameError(
                f"{self.name}: data_dependent_case({op!r}) must follow the lowering of {op!r} in the same set."
            )

        def register(body: F) -> F:
            self._definitions[op].case = DataDependentCase(when, body, instead)
            return body

        return register

    def value_check(self, *ops: str, values: Iterable[str]) -> Callable[[F], F]:
        """What torch refuses calls of ops for that are defined above in this set, of what is in their tensors.

        A compiled program cannot raise, so this is asked at the first call of each signature only, outside of traces:
        of a wrong index in the first batch a user hears as on the CPU. The decorated function takes some of the op's
        arguments by name and returns whether CPU torch may refuse them. If so, CPU torch is given the call, and its error
        raised.

        values: the tensor arguments that come as numpy arrays; if there are none, each call is asked about. Others come as
                jax.ShapeDtypeStruct, the rest as it is.
        Raises OpNameError if the set has no such op.
        """
        for op in ops:
            if op not in self._definitions:
                raise OpNameError(
                    f"{self.name}: value_check({op!r}) must follow the definition of {op!r} in the same set."
                )

        def register(refused: F) -> F:
            for op in ops:
                self._definitions[op].value_check = ValueCheck(refused, frozenset(values))
            return refused

        return register

    def decomposition(self, *ops: str, whole: bool = True) -> Callable[[F], F]:
        """The op as torch code that calls other ops. Runs on torch tensors, traced and compiled as a whole.

        With whole=False it runs call by call: for code that writes into its arguments though the schema does not say so.
        """

        def register(body: F) -> F:
            for op in ops:
                self._add(Definition(op, "decomposition", body, self._origin(body), whole=whole))
            return body

        return register

    def view(self, *ops: str) -> Callable[[Callable[..., Any]], ViewRules]:
        """A view op as the JAX function that reads it. Writing follows from it (see :class:`ViewRules`).

        The result aliases its input: it is never computed until it is read, and a write reaches the base.
        """

        def register(body: Callable[..., Any]) -> ViewRules:
            rules = ViewRules(body)
            for op in ops:
                self._add(ViewDefinition(op, "view", body, self._origin(body), rules=rules))
            return rules

        return register

    def function(self, *names: str) -> Callable[[F], F]:
        """A torch *function* ("torch.nn.functional.interpolate") as a JAX function, differentiable by jax.vjp.

        Caught in `Tensor.__torch_function__`, above aten. Tensors arrive as jax arrays, everything else as it came.
        May return NotImplemented to decline, and torch's own code runs.
        """

        def register(body: F) -> F:
            for name in names:
                self._add(Definition(name, "function", body, self._origin(body)))
            return body

        return register

    def autocast(self, policy: str, ops: Iterable[str]) -> None:
        """State what `ops` run in under autocast: one of "lower_precision_fp", "fp32", "promote".

        Source: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
        """
        if policy not in AUTOCAST_POLICIES:
            raise ValueError(f"OpSet.autocast: `policy` must be one of {AUTOCAST_POLICIES}, but is {policy!r}.")
        origin = self._caller_origin()
        for op in ops:
            self._autocast[op] = AutocastRule(op, policy, origin)

    # -- inside ----------------------------------------------------------------------------------

    def _add(self, definition: Definition) -> None:
        if definition.kind != "function" and not _OP_NAME.match(definition.op):
            raise OpNameError(
                f"{definition.origin}: an op is named 'namespace::name' or 'namespace::name.overload', as in "
                f"'aten::add.Tensor', but this one is {definition.op!r}."
            )
        definition.depends_on = self.depends_on
        earlier = self._definitions.get(definition.op)
        if earlier is not None:
            raise DuplicateOpError(
                f"{definition.op} is defined twice in {self.name}: at {earlier.origin.file}:{earlier.origin.line} and "
                f"at {definition.origin.file}:{definition.origin.line}. Remove one of them."
            )
        self._definitions[definition.op] = definition

    def _origin(self, body: Callable[..., Any]) -> Origin:
        code = getattr(inspect.unwrap(body), "__code__", None)
        if code is None:
            return self._caller_origin(depth=3)
        return Origin(self.name.partition(".")[0], self.name, code.co_filename, code.co_firstlineno)

    def _caller_origin(self, depth: int = 2) -> Origin:
        frame = inspect.currentframe()
        for _ in range(depth):
            frame = frame.f_back if frame is not None else None
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)
        return Origin(self.name.partition(".")[0], self.name, file, line)

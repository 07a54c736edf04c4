"""Tensor: a torch.Tensor on device "jax" whose data is a jax.Array. No op logic.

`Storage` holds one array in its logical shape; every Tensor over it shares it, so a write through one is seen by all.
`Aval` is what torch knows of a tensor without its data (size, stride, dtype), interned: kernels key on it by identity.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import torch

from torchax_core.convert import is_traced, torch_from_array
from torchax_core.dtypes import jax_dtype, torch_dtype
from torchax_core.entrances import entrance
from torchax_core.errors import LeakedTracerError, ViewWriteError
from torchax_core.placement import constrain, laid_out_like, several_devices
from torchax_core.symbolic import control_flow_error

__all__ = [
    "DEVICE",
    "INTERNAL",
    "Aval",
    "Storage",
    "Tensor",
    "become",
    "contiguous_stride",
    "make_tensor",
    "make_wrapper",
    "tensors_among",
    "wrap_array",
    "write_all",
]

DEVICE_TYPE = "jax"
# PrivateUse1 under its first name: device.py renames it to "jax", and this very object then prints as "jax:0".
DEVICE = torch.device("privateuseone", 0)

_tick = itertools.count(1)
_strided = torch.strided
make_wrapper = torch.Tensor._make_wrapper_subclass


class Active(threading.local):
    """What is active in this thread: the environment, and its look-up from torch op to kernel."""

    environment: Any = None
    kernels: Any = None
    trace: Any = None


active = Active()


def resolve_active() -> Any:
    """Give this thread its environment: the one its autograd caller was in, or the process's default."""
    from torchax_core.environment import Environment

    return Environment._attach_thread()


class Aval:
    """Size, stride and dtype of a tensor; one object per distinct triple, so `is` compares and the hash is free.

    wrapper: what a Tensor of this aval is made from: the arguments of torch's `_make_wrapper_subclass`, put together once.
    """

    __slots__ = ("dtype", "jax_dtype", "numel", "shape", "stride", "wrapper")

    _interned: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], Aval] = {}

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.jax_dtype = jax_dtype(dtype)
        self.numel = 1
        for n in shape:
            self.numel *= n
        # torch makes row-major strides itself, faster than it reads them
        strides = None if stride == contiguous_stride(shape) else stride
        self.wrapper = (Tensor, shape, strides, None, None, dtype, _strided, DEVICE)

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Aval:
        """The aval of that shape, stride (in elements) and dtype."""
        key = (tuple(shape), tuple(stride), dtype)
        found = cls._interned.get(key)
        if found is None:
            found = cls._interned.setdefault(key, cls(*key))
        return found

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Aval:
        """The aval of a row-major tensor."""
        return cls.of(shape, contiguous_stride(shape), dtype)

    def meta(self) -> torch.Tensor:
        """A meta tensor of this aval."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides as torch gives them: a dimension of length 0 counts as 1."""
    stride = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= n if n > 1 else 1
    return tuple(reversed(stride))


class Storage:
    """One jax array, in its logical shape, and a version that no two states of it share.

    stride: the torch strides of the array as a whole.

    Whoever else needs `array` to stay as it is holds a reference to it: before an array is donated its reference count
    is looked at, and one that is held elsewhere is copied.
    """

    __slots__ = ("__weakref__", "array", "stride", "version")

    def __init__(self, array: jax.Array, stride: tuple[int, ...]) -> None:
        self.array = array
        self.version = 0
        self.stride = stride

    def write(self, array: jax.Array) -> None:
        """Put new values, an array, in the place of the old ones; they lie on the devices as those did."""
        if several_devices():
            array = laid_out_like(array, self.array)
        self.array = array
        self.version = next(_tick)


def write_all(stores: Iterable[Storage], arrays: Iterable[jax.Array]) -> None:
    """Put new arrays in the place of the old ones, one for each storage."""
    if several_devices():
        for store, array in zip(stores, arrays, strict=True):
            store.write(array)
        return
    version = next(_tick)
    for store, array in zip(stores, arrays, strict=True):
        store.array = array
        store.version = version


class _Flatten:
    """`__tensor_flatten__`, which tensors marked `_plain` have not: torch asks with `hasattr`."""

    def __get__(self, tensor: Tensor | None, owner: type) -> Callable[..., tuple[list[str], Any]]:
        if tensor is not None and "_plain" in tensor.__dict__:
            raise AttributeError("__tensor_flatten__")
        return _flattened


def _flattened(*_: Any) -> tuple[list[str], Any]:
    return ["_carrier"], None


class Tensor(torch.Tensor):
    """A torch.Tensor on device "jax". Made by torch functions with `device="jax"`, by `.to("jax")`, or by
    :func:`torchax_core.tensor` from a jax array.

    Source: https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor
    """

    _store: Storage
    _aval: Aval
    _plain: bool  # set on gradients on their way into a compiled backward

    # Nothing is caught above aten unless a pack or an override asks for it (functions.py puts a handler here then):
    # C++ checks for this very object and goes straight on.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @entrance
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            kernels = active.kernels
            if kernels is None:
                kernels = resolve_active()
            kernel = kernels.get(func)
            if kernel is None:
                kernel = active.environment._kernel(func)
            return kernel(args, kwargs)
        except Exception as error:
            return explained(error, func)

    # -- the array -------------------------------------------------------------------------------

    def _array(self) -> jax.Array:
        return self._store.array

    def _write(self, array: jax.Array) -> None:
        """Put `array` (same shape and dtype) in the place of this tensor's values."""
        self._store.write(array)

    def jax(self) -> jax.Array:
        """The jax array of this tensor's present values: same shape and dtype, no copy. Later writes do not change it."""
        trace = active.trace
        if trace is not None:
            trace.lift(self)
        return self._array()

    @property
    def jax_device(self) -> Any:
        """The jax device the array lies on, or its sharding if it lies on several."""
        return self.jax().device

    def apply_jax(self, jax_function: Any, *args: Any, **kwargs: Any) -> Any:
        """`jax_function(array, *args, **kwargs)` of this tensor's array, arrays in the result as Tensors, with gradients."""
        from torchax_core.bridge import call_jax

        return call_jax(jax_function, self, *args, **kwargs)

    def apply_jax_(self, jax_function: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Put `jax_function(array, *args, **kwargs)` in the place of this tensor's values, and return it.

        Raises ShapeError if the result has another shape or dtype.
        """
        from torchax_core.bridge import write_jax

        return write_jax(self, jax_function, args, kwargs)

    def shard_(self, sharding: Any) -> Tensor:
        """Lay the array out by a jax sharding; the values stay what they are. Returns the tensor.

        Raises ViewWriteError for a view, which has no array of its own.
        """
        if self.__class__ is not Tensor:
            raise ViewWriteError(
                f"shard_: a view of shape {tuple(self.shape)} lies where its base does. Lay out the base, or a copy: "
                "`x = torchax_core.train.mark_sharding(x, sharding)`."
            )
        trace = active.trace
        if trace is not None:
            trace.lift(self)
        self._store.array = constrain(self._array(), sharding)
        self._write(self._store.array)
        return self

    @property
    def data(self) -> torch.Tensor:
        """The same values without gradient history; assigning makes this tensor be the one assigned, a CPU tensor too."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, Tensor):
            become(self, value)
        else:
            from torchax_core.moving import become_any

            become_any(self, value)

    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """torch's; a trace is told, since results of a function that ran its own backward want no gradients."""
        if active.trace is not None:
            active.trace.backward_ran = True
        _failed_in_backward.clear()
        try:
            super().backward(*args, **kwargs)
        except RuntimeError:
            if not _failed_in_backward:
                raise
            raise _failed_in_backward.pop() from None

    def detach_(self) -> torch.Tensor:
        """torch's; while traced, gradients that jax will ask for end there too."""
        super().detach_()
        if active.trace is not None:
            from torchax_core.cuts import detach_in_place

            detach_in_place(self)
        return self

    def item(self) -> Any:
        """The number in a tensor of one element. Raises DataDependentError under a trace."""
        self._python_value(".item()")
        return torch.Tensor.item(self)

    def tolist(self) -> Any:
        """The values as nested lists of Python numbers."""
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """torch's own error, as for any device but the CPU; with force=True a copy."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def _python_value(self, what: str) -> None:
        """Raise DataDependentError where a trace does not know the value."""
        trace = active.trace
        if trace is not None and trace.known.twin(self) is not None:
            return
        array = self._array()
        if is_traced(array):
            raise control_flow_error(what, array)

    def __bool__(self) -> bool:
        self._python_value("bool(tensor), as in `if tensor:`,")
        return torch.Tensor.__bool__(self)

    def __int__(self) -> int:
        self._python_value("int(tensor)")
        return torch.Tensor.__int__(self)

    def __float__(self) -> float:
        self._python_value("float(tensor)")
        return torch.Tensor.__float__(self)

    def __index__(self) -> int:
        self._python_value("index(tensor), as in `list[tensor]`,")
        return torch.Tensor.__index__(self)

    # -- Python protocol -------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own rebuild function for tensors whose storage has no bytes to write: weights_only loading allows it,
        # and it honours `map_location`.
        if getattr(self, "_is_param", False):
            return (torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict()))
        cpu = torch_from_array(self.jax())
        if self.stride() != cpu.stride():
            cpu = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(cpu)
        arguments = (cpu, self.dtype, str(self.device), self.requires_grad)
        return (torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments)

    def __format__(self, format_spec: str) -> str:
        # torch's own takes the number out of a tensor of its very own class alone
        if self.dim() or (not format_spec and is_traced(self._array())):
            return object.__format__(self, format_spec)
        return format(self.item(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  "
                "If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage, "
                "see https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            new = self.detach().clone()
        if getattr(self, "_is_param", False):
            new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
        else:
            new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in INTERNAL:
                setattr(new, name, copy.deepcopy(value, memo))
        return new

    # torch takes a subclass that has this pair for a "traceable wrapper", and `Module.to` then swaps tensors in place: tied
    # weights stay tied and optimizers made before the move see the moved parameters.
    __tensor_flatten__ = _Flatten()

    @functools.cached_property  # dynamo's guards tell tensors apart by it
    def _carrier(self) -> torch.Tensor:
        return torch._C._acc.create_empty_tensor(tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> torch.Tensor:
        # The stand-in that dynamo and export trace with: no wrapper, but a fake tensor of this device.
        carrier = inner["_carrier"]
        with getattr(carrier, "fake_mode", contextlib.nullcontext()):
            stand_in = torch.empty_strided(size, stride, dtype=carrier.dtype, device=carrier.device)
        if (
            getattr(carrier, "constant", None) is not None
        ):  # it stands for a known value, of torch.tensor(2, device="jax")
            stand_in.constant = carrier.constant  # type: ignore[attr-defined]
        return stand_in

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, kind: type | None = None) -> Tensor | None:
        # AOTAutograd's backward was traced with plain stand-ins, and so wants gradients that are no traceable wrappers.
        if kind is not torch.Tensor:
            return None
        array = self._array()
        tangent = make_tensor(array, Aval.contiguous(array.shape, self.dtype))
        tangent._plain = True
        return tangent

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
        return self.jax().__dlpack__(**{k: v for k, v in kwargs.items() if v is not None})

    def __dlpack_device__(self) -> Any:
        return self.jax().__dlpack_device__()


def _torch(self: Tensor) -> torch.Tensor:
    """A copy of the values on the CPU: same shape and dtype, without gradient history."""
    return torch_from_array(self.jax())


Tensor.torch = _torch  # type: ignore[attr-defined]  # in the class body it would hide the module in the annotations

_failed_in_backward: list[Exception] = []


class ForeignTensorError(RuntimeError):
    """Among the arguments is a tensor on device "jax" of somebody else's class, which is asked next."""


def explained(error: Exception, func: Any) -> Any:
    """Raise the error of a kernel so that it reaches the user.

    A tracer used after its trace had ended becomes LeakedTracerError. In a backward, torch's guard for devices made in
    Python calls into Python while C++ unwinds, and a Python error then ends the process. So there the error is kept for
    `Tensor.backward`, and torch is handed something it fails to take for a tensor, with an error of its own.
    """
    if isinstance(error, ForeignTensorError):
        return NotImplemented
    if isinstance(error, jax.errors.UnexpectedTracerError):
        leaked = LeakedTracerError(
            f"{func}: one of its tensors was made inside a jitted or transformed function and used after that had ended; it "
            "never had values. Return it from the function instead of storing it."
        )
        leaked.__cause__ = error
        error = leaked
    if torch._C._current_autograd_node() is None:
        raise error
    _failed_in_backward.append(error)
    return type(f"{type(error).__name__}: {error}", (), {})()


_OWN = ("_store", "_aval", "_path", "_offsets", "_cache", "_seen")
"""The attributes that say what a Tensor or View is; all others are the user's, but for Parameter's mark."""
INTERNAL = frozenset({*_OWN, "_is_param", "_plain", "_carrier", "_kind"})


def make_tensor(array: jax.Array, aval: Aval) -> Tensor:
    """A Tensor over a new storage. `array` has the aval's shape and dtype. The hot path: nothing is checked."""
    tensor = make_wrapper(*aval.wrapper)
    tensor._store = Storage(array, aval.stride)
    tensor._aval = aval
    return tensor  # type: ignore[return-value]


def share_tensor(store: Storage, aval: Aval) -> Tensor:
    """A Tensor over all of an existing storage."""
    tensor = make_wrapper(*aval.wrapper)
    tensor._store = store
    tensor._aval = aval
    return tensor  # type: ignore[return-value]


def wrap_array(array: jax.Array) -> Tensor:
    """A contiguous Tensor over a jax array (or tracer) of any dtype torch has."""
    return make_tensor(array, Aval.contiguous(array.shape, torch_dtype(array.dtype)))


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Every Tensor in nested lists of arguments, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif value.__class__ is list or value.__class__ is tuple:
            yield from tensors_among(value)


_changes = 0


def changes() -> int:
    """How often a tensor has become another so far: while this stays the same, tensors keep their storages."""
    return _changes


def become(target: Tensor, source: Tensor) -> None:
    """Make `target` be what `source` is: geometry, dtype, storage. For resized `out=`, `set_`, `t_`, `.data =`."""
    global _changes
    _changes += 1
    torch.Tensor.data.__set__(target, source)  # type: ignore[attr-defined]
    for name in _OWN:
        if name in source.__dict__:
            target.__dict__[name] = source.__dict__[name]
        else:
            target.__dict__.pop(name, None)
    target.__dict__.pop("_carrier", None)
    if target.__class__ is not source.__class__:
        target.__class__ = source.__class__


def describe(tensor: Tensor) -> str:
    """What torch prints for a tensor on this device; inside a trace, its aval and where it stands."""
    array = tensor._array()
    if is_traced(array):
        return f"tensor(<traced {tensor._aval}>, device='{tensor.device}')"
    if array.is_fully_addressable or array.is_fully_replicated:
        with torch.no_grad():
            text = torch._tensor_str._str(torch_from_array(array))
    else:
        devices = array.sharding.device_set
        processes = len({d.process_index for d in devices})
        text = f"tensor(<on {len(devices)} devices of {processes} processes, {tensor._aval}>)"
    suffixes = [f"device='{tensor.device}'"]
    if tensor.grad_fn is not None:
        suffixes_end = [f"grad_fn=<{type(tensor.grad_fn).__name__}>"]
    elif tensor.requires_grad:
        suffixes_end = ["requires_grad=True"]
    else:
        suffixes_end = []
    head, dtype_mark, tail = text.rpartition(", dtype=")
    body = head if dtype_mark else text[:-1]
    parts = [body, *suffixes, *([f"dtype={tail[:-1]}"] if dtype_mark else []), *suffixes_end]
    text = ", ".join(parts) + ")"
    return "Parameter containing:\n" + text if getattr(tensor, "_is_param", False) else text

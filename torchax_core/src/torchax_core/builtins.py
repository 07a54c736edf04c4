"""What the core itself does for device "jax": sharing, moving and reshaping storages. No arithmetic.

Each is made for an environment, so that it can hand on to the pack's kernel for what is an op's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy

from torchax_core.convert import array_from_numpy, array_from_torch, is_traced, torch_from_array, zeros_array
from torchax_core.dtypes import jax_dtype
from torchax_core.layouts import sparse_refused
from torchax_core.lazy import LazyBuffer
from torchax_core.overlap import check_elements_apart, check_shared_memory
from torchax_core.placement import sharding_of
from torchax_core.symbolic import symbol_of_array
from torchax_core.tensor import Aval, Storage, Tensor, become, contiguous_stride, make_tensor, share_tensor
from torchax_core.view import AS_STRIDED, ROOT, View, make_view

__all__ = ["BUILTINS", "empty_tensor", "from_cpu", "to_cpu"]

BUILTINS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {}
"""Op name -> maker(environment, func) -> what runs."""


def _builtin(*names: str) -> Callable[[Any], Any]:
    def register(maker: Any) -> Any:
        for name in names:
            BUILTINS[name] = maker
        return maker

    return register


def _plain(*names: str) -> Callable[[Any], Any]:
    """As _builtin, for a function that needs neither the environment nor the pack's kernel."""

    def register(run: Any) -> Any:
        def maker(environment: Any, func: Any) -> Any:
            return run

        maker.__name__ = run.__name__
        for name in names:
            BUILTINS[name] = maker
        return run

    return register


# -- sharing -------------------------------------------------------------------------------------


@_plain("aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift", "aten::_fw_primal", "aten::_make_dual")
def alias(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Another tensor over the same place of the same storage."""
    if not isinstance(self, Tensor):  # torch.tensor(cpu data) in a default-device context
        return self
    if self.__class__ is View:
        view = make_view(self._store, self._aval, self.storage_offset(), self._path, self._offsets)
        view._cache, view._seen = self._cache, self._seen
        return view
    return share_tensor(self._store, self._aval)


@_plain("aten::as_strided")
def as_strided(self: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Tensor:
    """A window of any geometry on the storage's memory, whatever view `self` is of it."""
    store = self._store
    offset = self.storage_offset() if storage_offset is None else storage_offset
    size, stride = tuple(size), tuple(stride)
    memory = store.array.size * np.dtype(store.array.dtype).itemsize // self._aval.jax_dtype.itemsize
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if len(size) and all(size) and last >= memory:
        itemsize = self._aval.jax_dtype.itemsize
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {(last + 1) * itemsize} are out of bounds for storage of size {memory * itemsize}"
        )
    if store.array.dtype != self._aval.jax_dtype:
        raise NotImplementedError(
            f"aten::as_strided on a view that reinterprets its base's dtype ({store.array.dtype} as {self.dtype}). "
            "Take the strided window first, then `.view(dtype)`."
        )
    path = ROOT.child(AS_STRIDED, (store.stride, size, stride), 1)
    for step in self._path.steps if isinstance(self, View) else ():
        if step.rules is not None and step.rules.bit:
            path = path.child(step.rules, step.static, 0)
    return make_view(store, Aval.of(size, stride, self.dtype), offset, path, (offset,))


# -- making and resizing -------------------------------------------------------------------------


def empty_tensor(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros: nothing is uninitialised here."""
    ours = jax_dtype(dtype)
    array = zeros_array(size, ours)
    aval = Aval.of(size, stride, dtype)
    if stride == contiguous_stride(size) or _is_dense(size, stride):
        return make_tensor(array, aval)
    length = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    store = Storage(array_from_numpy(np.zeros((length,), ours)), (1,))
    return make_view(store, aval, 0, ROOT.child(AS_STRIDED, ((1,), size, stride), 1), (0,))


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides fill memory without gap or overlap, in some order of dimensions."""
    expected = 1
    for n, step in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda p: p[1]):
        if step != expected:
            return False
        expected *= n
    return True


@_plain("aten::empty.memory_format")
def empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """torch.empty on the device."""
    dtype = dtype or torch.get_default_dtype()
    size = tuple(size)
    if any(n < 0 for n in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    stride = contiguous_stride(size)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = tuple(torch.empty(size, device="meta", memory_format=memory_format).stride())
    return empty_tensor(size, stride, dtype)


@_plain("aten::empty_strided")
def empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """torch.empty_strided on the device."""
    return empty_tensor(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


@_plain("aten::resize_")
def resize_(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Change the size; the first elements stay, new ones are zero. A tensor that shares its storage keeps sharing if it fits."""
    size = tuple(size)
    if size == tuple(self.shape):
        return self
    count = int(np.prod(size))
    store = self._store
    if self.__class__ is Tensor and store.stride == contiguous_stride(store.array.shape):
        with jax.enable_x64(True):
            memory = store.array.reshape(-1)
            if count > memory.size:
                memory = jnp.pad(memory, (0, count - memory.size))
            new = make_tensor(memory[:count].reshape(size), Aval.contiguous(size, self.dtype))
        become(self, new)
        return self
    if self.storage_offset() + count <= store.array.size:
        become(self, as_strided(self, size, contiguous_stride(size), self.storage_offset()))
        return self
    flat = self.detach().reshape(-1)
    fresh = empty_tensor(size, contiguous_stride(size), self.dtype)
    fresh.view(-1)[: flat.numel()].copy_(flat[:count])
    become(self, fresh)
    return self


@_plain("aten::resize_as_")
def resize_as_(self: Tensor, the_template: torch.Tensor, *, memory_format: Any = None) -> Tensor:
    """Change the size to that of `the_template`."""
    return resize_(self, the_template.shape, memory_format=memory_format)


@_plain("aten::set_.source_Tensor")
def set_tensor(self: Tensor, source: torch.Tensor) -> Tensor:
    """`self` becomes another name for `source`'s storage."""
    _same_kind("set_", self, source)
    become(self, alias(source))  # type: ignore[arg-type]
    return self


@_plain("aten::set_")
def set_empty(self: Tensor) -> Tensor:
    """`self` becomes empty."""
    become(self, empty_tensor((0,), (1,), self.dtype))
    return self


@_plain("aten::set_.source_Tensor_storage_offset")
def set_window(self: Tensor, source: torch.Tensor, storage_offset: int, size: Any, stride: Any = ()) -> Tensor:
    """`self` becomes a window on `source`'s storage."""
    _same_kind("set_", self, source)
    size = tuple(size)
    become(self, as_strided(source, size, tuple(stride) or contiguous_stride(size), storage_offset))  # type: ignore[arg-type]
    return self


@_plain("aten::set_.source_Storage_storage_offset")
def set_storage(self: Tensor, source: Any, storage_offset: int, size: Any, stride: Any = ()) -> Tensor:
    """`self` takes a copy of CPU bytes: what torch.load does with `map_location="jax"`."""
    size = tuple(size)
    cpu = torch.empty((0,), dtype=self.dtype)
    cpu.set_(source, storage_offset, size, tuple(stride) or contiguous_stride(size))
    become(self, from_cpu(cpu))
    return self


@_plain("aten::is_set_to")
def is_set_to(self: Tensor, tensor: torch.Tensor) -> bool:
    """Whether both are the same window on the same storage."""
    if not isinstance(tensor, Tensor) or tensor._store is not self._store:
        return False
    return (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
        self.shape,
        self.stride(),
        self.storage_offset(),
    )


def _same_kind(op: str, self: Tensor, source: torch.Tensor) -> None:
    if not isinstance(source, Tensor):
        raise RuntimeError(
            f"Attempted to {op} a tensor on device {self.device} to one on {source.device}; move it first, with `.to('jax')`."
        )
    if source.dtype != self.dtype:
        raise RuntimeError(f"Could not {op} tensor of type {source.dtype} to a tensor of type {self.dtype}")


# -- moving --------------------------------------------------------------------------------------


def from_cpu(source: torch.Tensor) -> Tensor:
    """A Tensor with a copy of a CPU tensor, its dtype and (if dense) its strides."""
    size, stride = tuple(source.shape), tuple(source.stride())
    if not _is_dense(size, stride):
        stride = tuple(torch.empty_like(source, device="meta").stride())
    return make_tensor(array_from_torch(source), Aval.of(size, stride, source.dtype))


def to_cpu(self: Tensor) -> torch.Tensor:
    """A CPU copy with the same strides where they are dense."""
    cpu = torch_from_array(self._array())
    stride = self._aval.stride
    if stride != tuple(cpu.stride()) and _is_dense(tuple(cpu.shape), stride):
        cpu = torch.empty_strided(cpu.shape, stride, dtype=cpu.dtype).copy_(cpu)
    return cpu


@_builtin("aten::_to_copy")
def to_copy(environment: Any, func: Any) -> Any:
    """Between devices here, between dtypes by the pack's lowering."""
    kernel: Any = None

    def run(self: torch.Tensor, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        nonlocal kernel
        kwargs = {
            k: v for k, v in kwargs.items() if v is not None and k not in ("pin_memory", "non_blocking", "layout")
        }
        if not isinstance(self, Tensor):
            return from_cpu(self.to("cpu", **kwargs))
        if device is None or torch.device(device).type == self.device.type:
            if kernel is None:
                kernel = environment._pack_kernel(func)
            return kernel((self,), kwargs)  # type: ignore[no-any-return]
        if torch.device(device).type == "meta":
            return torch.empty_strided(self.shape, self.stride(), dtype=kwargs.get("dtype", self.dtype), device="meta")
        cpu = to_cpu(self)
        return cpu.to(device, **kwargs)

    return run


@_builtin("aten::copy_")
def copy_(environment: Any, func: Any) -> Any:
    """Onto the device, off it, or, by the pack's `aten::copy`, within it."""
    kernel: Any = None
    sharing: set[Any] = set()

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        nonlocal kernel
        if not isinstance(self, Tensor):
            return self.copy_(to_cpu(src))  # type: ignore[arg-type]
        if 0 in self._aval.stride:
            check_elements_apart(self._aval.shape, self._aval.stride)
        if is_lazy(src):  # of a lazy module: there is nothing to copy yet
            if isinstance(src, UninitializedBuffer):
                self.__class__ = LazyBuffer
            return self
        if not isinstance(src, Tensor):
            if src.shape != self.shape:
                src = src.expand(self.shape)
            self._write(array_from_torch(src.to("cpu", self.dtype), _sharding(self)))
            return self
        if self._store is src._store and self is not src:
            check_shared_memory(func, (self, src), {}, [self], sharing)
        if self._aval.dtype is src._aval.dtype and self._aval.shape == src._aval.shape:
            self._write(src._array())  # arrays do not change: sharing one is copying it
            return self
        if kernel is None:
            kernel = environment._pack_kernel(func)
        return kernel((self, src), None)  # type: ignore[no-any-return]

    return run


@_plain("aten::_copy_from")
def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What C++ calls to copy between devices, from below our dispatch: so nothing here may dispatch on a Tensor."""
    if not isinstance(dst, Tensor):
        return dst.copy_(to_cpu(self))  # type: ignore[arg-type]
    source = to_cpu(self) if isinstance(self, Tensor) else self
    dst._write(array_from_torch(source.to(dst.dtype).expand(dst.shape), _sharding(dst)))
    return dst


def _sharding(target: Tensor) -> Any:
    """How what is copied from the host into `target` is to lie; None for a view, and for what lies on one device."""
    return sharding_of(target._store.array) if target.__class__ is Tensor else None


@_plain("aten::_copy_from_and_resize")
def copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """As _copy_from, the target made to fit first."""
    if isinstance(dst, Tensor):
        resize_(dst, self.shape)
    else:
        dst.resize_(self.shape)
    return copy_from(self, dst)  # type: ignore[no-any-return]


@_plain("aten::_local_scalar_dense")
def local_scalar_dense(self: Tensor) -> Any:
    """The Python number in a one-element tensor; under a trace, for torch's C++ only, a symbol that stands for it."""
    array = self._array()
    if is_traced(array):
        return symbol_of_array(array.reshape(()))
    value = np.asarray(array).reshape(())[()]
    return value.item() if hasattr(value, "item") and not isinstance(value.item(), np.generic) else float(value)


@_plain("aten::_sparse_compressed_tensor_unsafe", "aten::_sparse_coo_tensor_with_dims_and_tensors")
def sparse_tensor(*args: Any, **kwargs: Any) -> Any:
    """torch would make a tensor that nothing takes."""
    raise sparse_refused()


@_plain("aten::is_pinned")
def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """Device memory is never pinned host memory."""
    return False


@_plain("aten::_pin_memory")
def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """As on cuda."""
    raise RuntimeError(f"cannot pin 'torch.{self.device.type}.Tensor' only dense CPU tensors can be pinned")


@_plain("aten::record_stream")
def record_stream(self: torch.Tensor, s: Any) -> None:
    """Nothing to do: jax arrays live until their last use is over."""

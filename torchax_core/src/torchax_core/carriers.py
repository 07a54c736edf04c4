"""Which tensors carry the gradients of a program's state to where they go."""

from __future__ import annotations

import torch

from torchax_core.tensor import Aval, Storage, Tensor, contiguous_stride, share_tensor

__all__ = ["Carriers"]


class Carriers:
    """For storages that want gradients, a tensor over the whole of each: a program has a storage once, as an input, however
    many tensors there are over it.

    name: the program's, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._are_apart: dict[int, bool] = {}

    def of(self, tensors: list[tuple[Tensor, Storage, bool]]) -> dict[int, torch.Tensor]:
        """The carriers by their storages' identities. tensors: the state, and whether each wants gradients.

        Raises RuntimeError where leaves that share elements want gradients each of their own.
        """
        whole: dict[int, torch.Tensor] = {}
        views: dict[int, tuple[Storage, list[torch.Tensor]]] = {}
        for tensor, store, wants in tensors:
            # of several tensors over one storage (`w` and `w.detach()`), the one that wants gradients
            if wants and tensor.__class__ is Tensor:
                whole[id(store)] = tensor
            elif wants:
                views.setdefault(id(store), (store, []))[1].append(tensor)
        for key, (store, found) in views.items():
            if key in whole:
                continue
            base = found[0]._base
            if base is None or base.__class__ is not Tensor or not base.requires_grad:
                base = self._over_leaves(store, found)
            whole[key] = base
        return whole

    def _over_leaves(self, store: Storage, views: list[torch.Tensor]) -> torch.Tensor:
        """A tensor through which each element's gradient goes to the one of these leaves that it is in."""
        if len(views) > 1 and not (_contiguous(store) and self._apart(id(store), views)):
            raise RuntimeError(
                f"jit({self.name}): {len(views)} views of one storage want gradients each of their own, and share "
                "elements: a program has the storage once, as an input, and cannot tell which of them a gradient "
                "is for. Pass them as arguments, or let their base want the gradients."
            )
        base: torch.Tensor = share_tensor(store, Aval.of(store.array.shape, store.stride, views[0].dtype))
        if len(views) == 1:
            view = views[0]
            return torch.as_strided_scatter(base, view, view.shape, view.stride(), view.storage_offset())
        # torch's gradient of one as_strided_scatter through the next is zero
        numbers = torch.arange(store.array.size, device=base.device)
        flat = base.reshape(-1)
        for view in views:
            at = numbers.as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)
            flat = flat.index_copy(0, at, view.reshape(-1))
        return flat.reshape(store.array.shape)

    def _apart(self, key: int, views: list[torch.Tensor]) -> bool:
        """Whether no two of these views of one storage share an element."""
        if key not in self._are_apart:
            size = 1 + max(
                v.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True)) for v in views
            )
            numbers = torch.arange(size)
            taken = [numbers.as_strided(v.shape, v.stride(), v.storage_offset()).reshape(-1) for v in views]
            found = torch.cat(taken)
            self._are_apart[key] = found.unique().numel() == found.numel()
        return self._are_apart[key]


def _contiguous(store: Storage) -> bool:
    return store.stride == contiguous_stride(store.array.shape)

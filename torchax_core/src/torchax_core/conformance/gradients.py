"""Gradients of one sample against CPU torch's: first order, second order, and forward-mode AD."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils import _pytree as pytree

from torchax_core import testing
from torchax_core.conformance.compare import another_seed, assert_close, call, equal, reference
from torchax_core.conformance.samples import Sample, tensors_in

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = ["first", "forward", "second"]


def first(op: OpInfo, sample: Sample) -> None:
    """The gradients of all inputs that require them."""

    def gradients(*args: Any, **kwargs: Any) -> Any:
        return testing.gradients_of(_outputs(op, sample, args, kwargs), _inputs(args, kwargs))

    _compare(gradients, sample, "gradient")


def second(op: OpInfo, sample: Sample) -> None:
    """The gradients of these gradients, for the inputs and for the gradients that the outputs were given."""

    def gradients(*args: Any, **kwargs: Any) -> Any:
        inputs = _inputs(args, kwargs)
        outputs = _outputs(op, sample, args, kwargs)
        given = [_direction(x, 7 + i).requires_grad_() for i, x in enumerate(outputs)]
        firsts = torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True)
        return testing.gradients_of([x for x in firsts if x is not None and x.requires_grad], inputs + given)

    _compare(gradients, sample, "second gradient")


def forward(op: OpInfo, sample: Sample) -> None:
    """The tangents of all outputs by forward-mode AD."""

    def tangents(*args: Any, **kwargs: Any) -> Any:
        with forward_ad.dual_level():
            duals = {
                id(x): forward_ad.make_dual(x.detach(), _direction(x, 21 + i))
                for i, x in enumerate(_inputs(args, kwargs))
            }
            if not duals:
                raise ValueError("no input requires grad")
            args, kwargs = pytree.tree_map(lambda x: duals.get(id(x), x), (args, kwargs))
            outputs = tensors_in(sample.input.output_process_fn_grad(op(*args, **kwargs)))
            unpacked = [forward_ad.unpack_dual(x).tangent for x in outputs if x.is_floating_point() or x.is_complex()]
            return [x if x is None else x.clone() for x in unpacked]

    _compare(tangents, sample, "tangent")


def _inputs(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return list({id(x): x for x in tensors_in((args, kwargs)) if x.requires_grad}.values())


def _outputs(op: OpInfo, sample: Sample, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = sample.input.output_process_fn_grad(op(*args, **kwargs))
    return [x for x in tensors_in(found) if x.requires_grad]


def _direction(x: torch.Tensor, seed: int) -> torch.Tensor:
    return testing.sample(x.shape, x.dtype, low=-1, high=1, seed=seed).to(x.device)


def _compare(fn: Callable[..., Any], sample: Sample, what: str) -> None:
    expected, _ = reference(fn, sample.input)
    with another_seed():
        values = equal(reference(fn, sample.input)[0], expected)
    actual, _ = call(fn, sample.input, testing.DEVICE)
    assert_close(fn, sample.input, actual, expected, values=values, what=what)

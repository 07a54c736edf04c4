"""Every module of torch.nn that torch's own module database has samples of, against CPU torch: in training and, where that
differs, in evaluation; forward and backward, and the buffers afterwards."""

import copy

import pytest
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from torchax_core.testing import assert_same_result, moved

# The database gives these their random numbers in double precision, and they want them in their input's.
DOUBLE = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
# Dropout draws other numbers on the device; it has tests of its own.
DROPOUTS = ("dropout", "p")


def modules():
    for info in module_db:
        modes = [True, False] if info.train_and_eval_differ else [True]
        yield from (pytest.param(info, mode, id=f"{info.name}-{'train' if mode else 'eval'}") for mode in modes)


def run(module, args, kwargs, device):
    """What the module returns on `device`, the gradients of its parameters and inputs, and its buffers."""
    torch.manual_seed(0)
    module = copy.deepcopy(module).to(device)
    args, kwargs = moved((args, kwargs), device)
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    outputs = module(*args, **kwargs)
    wanted = [x for x in (*module.parameters(), *inputs) if x.requires_grad]
    roots = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    weights = [torch.linspace(0.5, 1.5, x.numel(), device=device).reshape(x.shape) for x in roots]
    grads = torch.autograd.grad(roots, wanted, weights, allow_unused=True) if roots and wanted else []
    return outputs, list(grads), list(module.buffers())


@pytest.mark.parametrize("info, training", modules())
def test_module(info, training):
    torch.manual_seed(0)
    dtype = torch.float64 if info.name in DOUBLE else torch.float32
    sample = next(iter(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)))
    given = sample.constructor_input
    module = info.module_cls(*given.args, **given.kwargs).train(training)
    for part in module.modules():
        for name in DROPOUTS:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
    if isinstance(module, LazyModuleMixin):
        module(*args, **kwargs)
    expected = run(module, args, kwargs, "cpu")
    # ten times torch.testing's tolerance, as in the sweep: gradients are sums in another order
    assert_same_result(run(module, args, kwargs, "jax"), expected, rtol=1.3e-5, atol=1e-4, on="jax")

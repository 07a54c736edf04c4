"""pack.py: the list of families is complete, and what they define fits torch."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

import torchax_ops_aten
from torchax_core.opset import Definition
from torchax_core.variants import find_op
from torchax_ops_aten import pack

SETS = pack.torchax_op_sets()
DEFINITIONS = [definition for op_set in SETS for definition in op_set]


def test_every_family_file_is_in_the_list():
    files = {path.stem for path in Path(torchax_ops_aten.__file__).parent.glob("*.py")}
    families = {name for name in files if hasattr(importlib.import_module(f"torchax_ops_aten.{name}"), "ops")}
    assert families == set(pack.FAMILIES)
    assert list(pack.FAMILIES) == sorted(pack.FAMILIES)


def test_op_sets_are_named_after_their_files():
    assert [op_set.name for op_set in SETS] == [f"torchax_ops_aten.{family}" for family in pack.FAMILIES]


def test_no_op_is_defined_in_two_places():
    seen: dict[str, Definition] = {}
    for definition in DEFINITIONS:
        other = seen.setdefault(definition.op, definition)
        assert other is definition, f"{definition.op}: {other.origin} and {definition.origin}"


def test_every_op_exists_in_this_torch():
    """Names are late bound, so that older and newer torches work; those this torch lacks are few and known."""
    lacking = [d.op for d in DEFINITIONS if d.kind != "function" and find_op(d.op) is None]
    if torch.__version__.startswith("2.14"):
        assert lacking == ["aten::cholesky"]  # an op until 2.13


def test_every_op_is_in_a_namespace_the_pack_serves():
    assert {d.op.partition("::")[0] for d in DEFINITIONS if d.kind != "function"} <= set(pack.TORCHAX_NAMESPACES)


def test_in_place_and_out_forms_are_not_written_by_hand():
    # random ops without a functional twin, and factories whose out= form takes arguments the op has not, are exceptions
    def writes(func):
        return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)

    written = [d.op for d in DEFINITIONS if (func := find_op(d.op)) is not None and writes(func)]
    assert written == []


@pytest.mark.parametrize("family", pack.FAMILIES)
def test_lowerings_of_some_length_have_a_docstring(family):
    ops = importlib.import_module(f"torchax_ops_aten.{family}").ops
    for definition in ops:
        body = inspect.unwrap(definition.body)
        if inspect.isfunction(body) and len(inspect.getsource(body).splitlines()) > 6:
            assert inspect.getdoc(definition.body), f"{definition.op} at {definition.origin} has no docstring"


X, HALF, WHERE = torch.linspace(0.1, 0.9, 24).reshape(4, 6), torch.linspace(-1, 1, 12).reshape(4, 3), torch.arange(4)
VOLUME, PLACES = (
    torch.linspace(-1, 1, 64).reshape(1, 1, 4, 4, 4),
    torch.tensor([[[[[0, 2], [8, 10]], [[32, 34], [40, 42]]]]]),
)
WITHOUT_META = {
    "_masked_softmax": (X, X > 2, 1),
    "_masked_softmax_backward": (X, X, X > 2, 1),
    "glu_jvp": (HALF, X, X, 1),
    "glu_backward_jvp": (X, HALF, X, HALF, X, 1),
    "matmul_backward": (torch.ones(4, 4), X, X.T.contiguous(), [True, True]),
    "multi_margin_loss_backward": (torch.ones(()), X, WHERE, 1, 1.0),
    "multilabel_margin_loss_backward": (torch.ones(()), X, torch.zeros(4, 6, dtype=torch.int64), 1, X),
    "fractional_max_pool3d_backward": (torch.ones(1, 1, 2, 2, 2), VOLUME, [2, 2, 2], [2, 2, 2], PLACES),
    "_standard_gamma_grad": (X, X),
    "_sample_dirichlet": (X,),
    "_dirichlet_grad": (X, X, X + 1),
    "binomial": (X, X),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", WITHOUT_META)
def test_results_that_no_meta_kernel_describes_have_the_dtype_of_what_they_are_of(op, dtype):
    def given(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.to("jax", dtype) if x.is_floating_point() else x.to("jax")

    found = getattr(torch.ops.aten, op)(*map(given, WITHOUT_META[op]))
    assert {t.dtype for t in (found if isinstance(found, (tuple, list)) else [found])} == {dtype}

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

"""jit's options: static_argnames, in_shardings, out_shardings, name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import torchax_core


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: int


def test_static_arguments_by_position_and_name() -> None:
    @torchax_core.jit(static_argnames=("settings", "powers"), name="scaled")
    def scale(x: torch.Tensor, settings: Settings, powers: tuple[float, ...] = (1,)) -> torch.Tensor:
        for power in powers:
            x = x * settings.factor * power
        return x

    x = torch.ones(2, device="jax")
    assert scale(x, Settings(2)).tolist() == [2, 2]
    assert scale(x, settings=Settings(3), powers=(2, 0.5)).tolist() == [9, 9]
    assert len(scale.compilations) == 2
    scale(x + 1, Settings(2))
    assert len(scale.compilations) == 2
    for one in (1, 1.0, True):  # equal, and yet three
        scale(x.long(), Settings(2), (one,))
    assert len(scale.compilations) == 5
    assert (
        scale.explain().startswith("scaled #1: first call") and "@jit_scaled" in scale.lower(x, Settings(2)).as_text()
    )
    nested = torchax_core.jit(lambda x: scale(x, Settings(5)))
    assert nested(x).tolist() == [5, 5]

    with pytest.raises(TypeError, match="'settings' is a list, which has no hash"):
        scale(x, [1])
    with pytest.raises(TypeError, match="'settings' holds a tensor"):
        scale(x, (x,))
    with pytest.raises(TypeError, match="has 'z', but the function takes x"):
        torchax_core.jit(lambda x: x, static_argnames="z")


def test_static_arguments_of_methods_and_modules() -> None:
    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor, powers: dict) -> torch.Tensor:
            return x * len(powers)

        @torchax_core.jit(static_argnames="n")
        def times(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

    x = torch.ones(2, device="jax")
    assert Scale().times(x, 3).tolist() == Scale().times(x, n=3).tolist() == [3, 3]
    jitted = torchax_core.jit(Scale(), static_argnames="powers")
    assert jitted(x, frozenset({1, 2})).tolist() == [2, 2]


SHARDED = textwrap.dedent(
    """
    import jax, torch, torchax_core
    from torchax_core import interop
    from torchax_core.errors import ShapeError

    mesh = jax.make_mesh((4,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    x, y = torch.ones(8, 8, device="jax"), torch.ones(8, 8, device="jax")
    weight = torch.ones(8, 8, device="jax").shard_(rows)

    @torchax_core.jit(in_shardings=({"a": rows}, None), out_shardings=(rows, {"sum": None}))
    def step(tree, y):
        weight.mul_(2)
        tree["a"].add_(0)
        return tree["a"] @ weight + y, {"sum": weight.sum()}

    for number in range(3):
        out, sums = step({"a": x}, y)
        assert out.jax().sharding.spec == weight.jax().sharding.spec == jax.P("x")
        assert sums["sum"].item() == 64 * 2 ** (number + 1)
    assert len(step.compilations) == 1
    assert "devices=[4,1]<=[4]" in step.lower({"a": x}, y).compile().as_text()

    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        double = torchax_core.jit(lambda x: x * 2, in_shardings=jax.P("x"), out_shardings=jax.P(None, "x"))
        try:
            double(x)
        except ShapeError as error:
            assert "names axes of a mesh, but none is set" in str(error)
        with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=(kind,))):
            assert double(x).jax().sharding.spec == jax.P(None, "x")
    with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=(kind,))):
        assert jax.jit(interop.jax_view(double))(x.jax()).sharding.spec == jax.P(None, "x")

    wants = torch.arange(64.0, device="jax").reshape(8, 8).requires_grad_()
    squares = torchax_core.jit(lambda x: (x**2).sum(0), in_shardings=rows, out_shardings=rows)
    result = squares(wants)
    result.sum().backward()
    assert result.jax().sharding.spec == jax.P("x") and torch.equal(wants.grad.cpu(), 2 * wants.detach().cpu())

    for call, words in (
        (lambda: step({"b": x}, y), "dict of 'a' is no prefix of dict of 'b'"),
        (lambda: step({"a": x}), "has 2 entries, one for each positional argument"),
        (lambda: step(tree={"a": x}, y=y), "the call has tree, y by keyword"),
    ):
        try:
            call()
        except (ShapeError, TypeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    print("done")
    """
)


def test_shardings_of_arguments_and_results() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr[-3000:]

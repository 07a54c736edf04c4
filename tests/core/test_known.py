"""Values that are known while a function is traced: integers and bools that follow from constants."""

from __future__ import annotations

import jax
import pytest
import torch

import torchax_core
import torchax_core.known
from torchax_core.errors import DataDependentError


@pytest.fixture
def x():
    return torch.arange(12.0).reshape(3, 4)


def _as_eager(function, x):
    """The results of a function jitted, twice, equal to CPU torch's, and the program it became."""
    expected = function(x)
    jitted = torchax_core.jit(function)
    ours = x.to("jax")
    for _ in range(2):
        result = jitted(ours)
        assert result.dtype == expected.dtype and result.shape == expected.shape
        torch.testing.assert_close(result.cpu(), expected)
    return jitted.lower(ours).as_text()


def test_a_branch_on_what_shapes_say(x):
    def positions(x):
        at = torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(x.shape[0], -1)
        steps = torch.diff(at, prepend=at[:, :1] - 1, dim=-1)
        segments = (steps != 1).cumsum(-1)
        if (segments[:, -1] == 0).all():
            return x * 2
        return x * segments

    text = _as_eager(positions, x)
    assert "iota" not in text and "compare" not in text


@pytest.mark.parametrize(
    "ask",
    [
        lambda at: at.tolist()[2],
        lambda at: at[2].item(),
        lambda at: at[1:].tolist()[1],
        lambda at: int(at.max()) - 1,
        lambda at: (at > 1).nonzero().shape[0] + 1,
        lambda at: at.flip(0).to(torch.int32).argmin().item() - 1,
        lambda at: torch.cat([at, at.new_zeros(2)]).unique().numel() - 2,
        lambda at: 2 if at.equal(torch.arange(4, device=at.device)) else 0,
        lambda at: len(at.cpu().numpy()) - 2,
        lambda at: 2 if torch.ones(3, dtype=torch.bool, device=at.device).all() else 0,
        lambda at: torch.full((2,), 2, device=at.device).prod().item() // 2,
        lambda at: torch.tensor([1, 2], device=at.device).tolist()[1],
        lambda at: at.repeat(2).numel() - int(at.repeat(2).sum()) + 6,
    ],
)
def test_numbers_asked_for(x, ask):
    _as_eager(lambda x: x * ask(torch.arange(4, device=x.device)), x)


def test_what_is_written_to_is_known_no_longer(x):
    def write(x):
        at = torch.zeros(4, dtype=torch.long, device=x.device)
        at[1] = x.sum().long()
        if at.any():
            return x
        return x + 1

    with pytest.raises(DataDependentError):
        torchax_core.jit(write)(x.to("jax"))


def test_a_write_through_a_view_is_seen(x):
    def write(x):
        at = torch.arange(4, device=x.device)
        at[1:3] += 5
        return x[:, at.clamp(max=3)] + at

    _as_eager(write, x)


def test_what_comes_from_outside_is_not_known(x):
    limit = torch.tensor(3, device="jax")
    with pytest.raises(DataDependentError):
        torchax_core.jit(lambda x: x if limit > 2 else -x)(x.to("jax"))


def test_random_numbers_are_not_known(x):
    def draw(x):
        return x if torch.randint(0, 9, (), device=x.device) > 4 else -x

    with pytest.raises(DataDependentError):
        torchax_core.jit(draw)(x.to("jax"))


def test_an_override_decides_itself(x):
    calls = []

    def twice(end, **kwargs):
        calls.append(end)
        return jax.numpy.arange(0, 8, 2)

    with torchax_core.default_env().override_op_definition("aten::arange", twice, is_jax_function=True):
        result = torchax_core.jit(lambda x: x * torch.arange(4, device=x.device))(x.to("jax"))
    torch.testing.assert_close(result.cpu(), x * torch.arange(0, 8, 2))
    assert calls


def test_long_ranges_stay_in_the_program():
    def mask(x):
        at = torch.arange(len(x), device=x.device)
        return torch.where(at[:, None] >= at[None, :4], x[:, None], 0)

    x = torch.randn(100_000)
    jitted = torchax_core.jit(mask)
    ours = x.to("jax")
    torch.testing.assert_close(jitted(ours).cpu(), mask(x))
    assert len(jitted.lower(ours).as_text()) < 20_000


def test_what_would_become_long_is_not_computed_on_the_way(monkeypatch):
    """Padding and indexing make more of little."""
    made, here = [], torchax_core.known._here

    def noting(result, moved):
        made.append(result.numel())
        return here(result, moved)

    monkeypatch.setattr("torchax_core.known._here", noting)

    def widen(x):
        at = torch.arange(300, device=x.device)
        table = at.repeat(200).view(200, 300)
        return torch.nn.functional.pad(at, (0, 100_000)), table[at.clamp(max=199)], x

    for ours, theirs in zip(torchax_core.jit(widen)(torch.ones(1).to("jax")), widen(torch.ones(1)), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert max(made) <= 60_000


def test_constants_that_are_kept_are_new_at_each_call(x):
    holder = torch.nn.Module()

    @torchax_core.jit
    def keep(x):
        holder.mask = torch.arange(3, device=x.device)
        return x + 1, holder.mask

    ours = x.to("jax")
    _, returned = keep(ours)
    for written in (returned, holder.mask):
        written += 7
        _, again = keep(ours)
        assert holder.mask.tolist() == again.tolist() == [0, 1, 2]


def test_other_devices_and_types_are_left_to_their_ops(x):
    def moved(x):
        at = torch.arange(4, device=x.device)
        assert at.to("meta").device.type == "meta"
        assert at.cpu().device.type == "cpu"
        return x * at.to(torch.float64).sqrt().float() + at.double().mean()

    _as_eager(moved, x.double())


def test_an_index_out_of_range_has_torchs_words(x):
    def read(x):
        return x + torch.arange(4, device=x.device)[torch.tensor([4], device=x.device)]

    with pytest.raises(IndexError, match="out of bounds"):
        torchax_core.jit(read)(x.to("jax"))

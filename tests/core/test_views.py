"""Views alias: reads see writes, writes reach the base, through any chain; geometry and autograd are torch's."""

from __future__ import annotations

import pytest
import torch

from torchax_core.testing import assert_matches_torch, sample

CHAINS = {
    "t": lambda x: x.t(),
    "select": lambda x: x[1],
    "select negative": lambda x: x.select(1, -1),
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[:, 1::2],
    "slice of transpose": lambda x: x.t()[1:3],
    "diagonal": lambda x: x.diagonal(1),
    "unsqueeze, transpose, select": lambda x: x.unsqueeze(0).transpose(0, 2)[1],
    "permute, view": lambda x: x.view(3, 2, 2).permute(2, 0, 1)[0],
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4), 1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "split": lambda x: x.split(2, dim=1)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "squeeze": lambda x: x[0:1].squeeze(0),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "expand then slice": lambda x: x.unsqueeze(0).expand(1, 3, 4)[0, 1:],
    "view dtype": lambda x: x.view(torch.int32),
}
WRITES = {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(3),
    "fill_": lambda v: v.fill_(7),
    "copy_": lambda v: v.copy_(torch.arange(v.numel(), device=v.device).reshape(v.shape)),
    "slice assign": lambda v: v.__setitem__(slice(0, 1), 5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("chain", CHAINS)
def test_writes_reach_the_base_and_reads_see_them(chain: str, write: str) -> None:
    bases, views = {}, {}
    for device in ("cpu", "jax"):
        base = torch.arange(12.0).reshape(3, 4).to(device)
        view, other = CHAINS[chain](base), CHAINS[chain](base)
        other.sum()  # read once, so that a stale cache would show
        WRITES[write](view)
        assert torch.equal(view.cpu(), other.cpu())
        base.neg_()  # exact for every bit pattern, denormals included, which XLA's multiplication on CPU flushes
        bases[device], views[device] = base, view
    assert torch.equal(bases["jax"].cpu(), bases["cpu"])
    assert torch.equal(views["jax"].cpu(), views["cpu"])
    assert views["jax"].stride() == views["cpu"].stride()
    assert views["jax"].storage_offset() == views["cpu"].storage_offset()
    assert views["jax"].is_contiguous() == views["cpu"].is_contiguous()


def test_complex_views_write_back() -> None:
    for device in ("cpu", "jax"):
        x = torch.complex(torch.ones(2), torch.zeros(2)).to(device)
        torch.view_as_real(x)[:, 1] = 4
        x.real.add_(1)
        x.conj().mul_(2)
        assert torch.equal(x.resolve_conj().cpu(), torch.complex(torch.full((2,), 4.0), torch.full((2,), 8.0)))


def test_gradients_through_views_and_in_place() -> None:
    grads = {}
    for device in ("cpu", "jax"):
        x = torch.arange(12.0).reshape(3, 4).to(device).requires_grad_()
        y = x * 1
        y[0].mul_(2)
        y.t()[1:].mul_(3)
        y[:, 1] = y[:, 0] * 3
        (y**2).sum().backward()
        grads[device] = x.grad.cpu()
    torch.testing.assert_close(grads["jax"], grads["cpu"])


def test_metadata_changes_in_place() -> None:
    for device in ("cpu", "jax"):
        x = torch.arange(6.0, device=device).reshape(2, 3)
        x.t_()
        assert x.shape == (3, 2) and x.stride() == (1, 3)
        x.unsqueeze_(0).add_(1)
        assert x.flatten().tolist() == [1, 4, 2, 5, 3, 6]
        y = torch.arange(4.0, device=device)
        y.resize_(6)
        assert y.shape == (6,) and y[:4].tolist() == [0, 1, 2, 3]
        z = torch.zeros(2, device=device)
        z.set_(y)
        z[0] = 9
        assert y[0] == 9


def test_data_detach_and_version() -> None:
    x = torch.ones(3, device="jax", requires_grad=True)
    x.data = torch.zeros(2, device="jax")
    assert x.shape == (2,) and x.tolist() == [0, 0]
    d = x.detach()
    version = d._version
    d.add_(1)
    assert x.tolist() == [1, 1] and d._version == version + 1
    y = torch.exp(x)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_out_forms() -> None:
    out = torch.empty(3, device="jax")
    assert torch.exp(torch.zeros(3, device="jax"), out=out) is out and out.tolist() == [1, 1, 1]
    base = torch.zeros(2, 3, device="jax")
    torch.add(torch.ones(3, device="jax"), 1, out=base[1])
    assert base.tolist() == [[0, 0, 0], [2, 2, 2]]
    small = torch.empty(0, device="jax")
    torch.mul(torch.ones(2, device="jax"), 3, out=small)
    assert small.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.exp(torch.zeros(2, device="jax"), out=torch.empty(2, dtype=torch.int64, device="jax"))


def test_masks_and_index_forms() -> None:
    for device in ("cpu", "jax"):
        x = torch.arange(6.0, device=device).reshape(2, 3)
        assert x[x > 2].tolist() == [3, 4, 5]
        x[x > 3] = 0
        x[..., -1] += 10
        x[[0]] *= 2
        assert x[None, :, [2, 0]].tolist() == [[[24, 0], [10, 3]]]


def test_every_metadata_form_finds_its_view() -> None:
    for device in ("cpu", "jax"):
        x = torch.arange(6.0, device=device).reshape(1, 2, 3)
        x.transpose_(1, 2).squeeze_(0).unsqueeze_(-1).squeeze_(dim=2)
        assert x.shape == (3, 2) and x.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_out_of_another_dtype_follows_torch() -> None:
    def outs(device: str) -> list[object]:
        x = torch.full((3,), 1.5, device=device)
        integer = {"dtype": torch.int64, "device": device}
        return [
            torch.sum(x, 0, out=torch.empty((), **integer)).tolist(),
            torch.prod(x, 0, out=torch.empty((), **integer)).tolist(),
            torch.cumsum(x, 0, out=torch.empty(3, **integer)).tolist(),
            torch.arange(0, 3.5, out=torch.empty(0, **integer)).tolist(),  # 3 elements before torch 2.14, then 4
        ]

    assert outs("jax") == outs("cpu")
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(2, dtype=torch.int64, device=device).logit_()


def test_64_bit_writes_through_a_view() -> None:
    for device in ("cpu", "jax"):
        x = torch.arange(1.0, 7.0, dtype=torch.float64, device=device)
        x[1:4].mul_(0.1)
        x[2:].i0_()
        assert x.dtype is torch.float64
        torch.testing.assert_close(x.cpu()[1].item(), 0.2, rtol=0, atol=0)
        torch.testing.assert_close(x.cpu()[5], torch.special.i0(torch.tensor(6.0, dtype=torch.float64)))


def test_windows_on_the_memory_of_conjugate_and_negative_views():
    x = sample((2, 3), torch.complex64)
    assert_matches_torch(lambda x: x.conj().as_strided((2, 2), (1, 2), 1), x)
    assert_matches_torch(lambda x: torch._neg_view(x.conj()).as_strided((2, 2), (1, 2), 1), x)

    def write(x):
        x.conj().as_strided((2, 2), (1, 2), 1).mul_(2j)
        return x

    assert_matches_torch(write, x)

"""Random imperative programs: views of views, writes through them, reads in between, on CPU, on "jax", and jitted.

Each program is a list of small numbers, read as instructions, so that hypothesis can shrink one that fails. Values are
integers of a few digits in float64: every order of summation gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import torch

import torchax_core

VIEWS: list[Callable[[torch.Tensor, int], torch.Tensor]] = [
    lambda x, k: x[k % x.shape[0]] if x.dim() > 1 else x[k % x.shape[0] :],
    lambda x, k: x[:: 1 + k % 2],
    lambda x, k: x.transpose(0, -1),
    lambda x, k: x.narrow(-1, 0, max(1, x.shape[-1] - k % 2)),
    lambda x, k: x.unsqueeze(k % (x.dim() + 1)),
    lambda x, k: x.view(-1) if x.is_contiguous() else x.detach(),
    lambda x, k: x.diagonal() if x.dim() == 2 else x.chunk(2)[0],
    lambda x, k: x.unflatten(0, (2, -1)) if x.shape[0] % 2 == 0 else x.movedim(0, -1),
    lambda x, k: x.split(1 + k % 2, dim=-1)[-1],
    lambda x, k: x.unfold(-1, 1, 1 + k % 2),
    lambda x, k: x.as_strided((2,), (1,), x.storage_offset()) if x.numel() >= 2 and x.stride(-1) == 1 else x[:1],
    lambda x, k: x.squeeze(),
]
WRITES: list[Callable[[torch.Tensor, torch.Tensor, int], object]] = [
    lambda x, y, k: x.add_(k),
    lambda x, y, k: x.mul_(-1),
    lambda x, y, k: x.fill_(k),
    lambda x, y, k: x.copy_(y.sum()),
    lambda x, y, k: x.add_(x, alpha=k % 3),
    lambda x, y, k: x.clamp_(-50, 50),
    lambda x, y, k: x.__setitem__(0, k),
    lambda x, y, k: x.sub_(y.flatten()[0].clone()),
    lambda x, y, k: x.masked_fill_(x > k, k),
    lambda x, y, k: x.index_fill_(0, torch.tensor([0], device=x.device), k),
    lambda x, y, k: torch.neg(x.clone(), out=x) if not x.requires_grad else x.neg_(),
    lambda x, y, k: x.zero_() if k % 5 == 0 else x.floor_(),
    lambda x, y, k: x.cumsum_(0),
    lambda x, y, k: torch._foreach_add_([x], float(k)),
]
READS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x + 1,
    lambda x, y: x * y.sum(),
    lambda x, y: torch.cat([x.flatten(), y.flatten()]),
    lambda x, y: x.clone(),
    lambda x, y: x.contiguous(),
    lambda x, y: x.reshape(-1),
    lambda x, y: x.relu(),
    lambda x, y: torch.where(x > 0, x, -x),
]


def run(program: list[tuple[int, int, int, int]], base: torch.Tensor) -> list[torch.Tensor]:
    """All tensors that the program makes, the base first."""
    tensors = [base]
    for kind, which, place, k in program:
        x = tensors[place % len(tensors)]
        y = tensors[(place // 2) % len(tensors)]
        if x.dim() == 0:
            x = x.view(1)
        if kind == 0:
            tensors.append(VIEWS[which % len(VIEWS)](x, k))
        elif kind == 1:
            # torch leaves writes through overlapping memory, and ranges beyond exact integers, undefined
            if not any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
                WRITES[which % len(WRITES)](x, y, k)
                x.remainder_(101)
        else:
            tensors.append(READS[which % len(READS)](x, y).remainder(101))
    return tensors


instruction = st.tuples(st.integers(0, 2), st.integers(0, 13), st.integers(0, 20), st.integers(0, 7))
programs = st.lists(instruction, min_size=1, max_size=10)
settings = hypothesis.settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)


def base() -> torch.Tensor:
    return torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6).clone()


@settings
@hypothesis.given(programs)
def test_eager(program) -> None:
    want, got = run(program, base()), run(program, base().to("jax"))
    for w, g in zip(want, got, strict=True):
        assert torch.equal(w, g.cpu())
        assert (w.stride(), w.storage_offset(), w._is_view()) == (g.stride(), g.storage_offset(), g._is_view())


@hypothesis.settings(settings, max_examples=12)
@hypothesis.given(programs)
def test_jitted(program) -> None:
    want_base = base()
    want = run(program, want_base)
    got_base = base().to("jax")
    got = torchax_core.jit(lambda: [t.clone() for t in run(program, got_base)])()
    for w, g in zip(want, got, strict=True):
        assert torch.equal(w, g.cpu())
    assert torch.equal(want_base, got_base.cpu())


@hypothesis.settings(settings, max_examples=25)
@hypothesis.given(programs)
def test_gradients(program) -> None:
    def gradient(device: str) -> tuple[object, torch.Tensor | None]:
        leaf = base().to(device).requires_grad_()
        try:
            tensors = run(program, leaf * 1)
            loss = sum((t * t).sum() for t in tensors)
            loss.backward()
        except (
            RuntimeError
        ) as error:  # a view made under no_grad, of a multi-output view, or a value saved and overwritten
            return str(error).partition(":")[0][:40], None
        return "", leaf.grad.cpu()

    want_error, want = gradient("cpu")
    got_error, got = gradient("jax")
    assert want_error == got_error
    assert want is None or torch.allclose(want, got, rtol=1e-12, atol=0)

"""Embeddings against torch, with the gradients of table and weights."""

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, assert_same_error, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_embedding(shape, dtype):
    table, indices = sample((7, 4), dtype), sample(shape, torch.int64, low=0, high=7, seed=1)
    assert_matches_torch(F.embedding, indices, table, grad=dtype != torch.bfloat16)
    assert_matches_torch(F.embedding, indices.int(), table)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
def test_gradient_of_a_table(padding_idx, scale_grad_by_freq):
    table, indices = sample((7, 4), torch.float64), torch.tensor([[2, 2, 6], [0, 6, 2]])
    assert_matches_torch(
        lambda t: F.embedding(indices.to(t.device), t, padding_idx, scale_grad_by_freq=scale_grad_by_freq),
        table,
        grad=True,
    )


def test_the_gradient_of_a_half_table_keeps_the_sum():
    table = torch.zeros(2, 1, dtype=torch.bfloat16, device="jax", requires_grad=True)
    F.embedding(torch.zeros(1000, dtype=torch.int64, device="jax"), table).sum().backward()
    assert table.grad[0].item() == 1000


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_max_norm_writes_to_the_table(norm_type):
    table, indices = sample((7, 4), torch.float32), torch.tensor([1, 3, 3, 6])
    assert_matches_torch(lambda t, i: (F.embedding(i, t, None, 1.0, norm_type), t), table, indices)


def test_one_hot():
    assert_matches_torch(F.one_hot, torch.tensor([[0, 2], [1, 1]]), 4)


BAGS = torch.tensor([4, 0, 2, 2, 6, 1, 3, 3, 2])
OFFSETS = torch.tensor([0, 0, 4, 7, 9])  # the first and the last bag are empty


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode, include_last_offset, padding_idx):
    table = sample((7, 4), torch.float64)

    def bag(table, indices, offsets):
        return F.embedding_bag(
            indices, table, offsets, mode=mode, include_last_offset=include_last_offset, padding_idx=padding_idx
        )

    assert_matches_torch(bag, table, BAGS, OFFSETS, grad=True)
    assert_matches_torch(bag, table.float(), BAGS.int(), OFFSETS.int(), grad=True)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_bag_with_weights(padding_idx):
    table, weights = sample((7, 4), torch.float64), sample((9,), torch.float64, seed=1)

    def bag(table, indices, offsets, weights):
        return F.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=weights, padding_idx=padding_idx)

    assert_matches_torch(bag, table, BAGS, OFFSETS, weights, grad=True)


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="CPU torch before 2.14 divides by the counts of other indices")
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_scaled_by_frequency(mode):
    def bag(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, mode=mode, scale_grad_by_freq=True)

    assert_matches_torch(bag, sample((7, 4), torch.float64), BAGS, OFFSETS, grad=True)


def test_embedding_bag_of_a_table_of_indices():
    table, indices = sample((7, 4), torch.float32), sample((3, 5), torch.int64, low=0, high=7, seed=1)
    assert_matches_torch(lambda t, i: F.embedding_bag(i, t, mode="mean"), table, indices, grad=True)


def test_no_indices_at_all():
    table, none = sample((7, 4), torch.float32), torch.empty(0, dtype=torch.int64)
    for mode in ("sum", "mean", "max"):
        assert_matches_torch(
            lambda t, i, o, m=mode: F.embedding_bag(i, t, o, mode=m), table, none, torch.tensor([0, 0])
        )


@pytest.mark.usefixtures("new_signatures")
@pytest.mark.parametrize(
    "fn",
    [
        lambda table: F.embedding(torch.tensor([[0, 4]], device=table.device), table),
        lambda table: F.embedding(torch.tensor([-1], device=table.device), table.requires_grad_()),
        lambda table: F.embedding_bag(torch.tensor([[0, 4]], device=table.device), table),
        lambda table: F.embedding_bag(table.new_tensor([1, 3]).long(), table, table.new_tensor([0, 5]).long()),
        lambda table: F.one_hot(torch.tensor([0, 4], device=table.device), 4),
        lambda table: F.one_hot(torch.tensor([0, -1], device=table.device), 4),
    ],
)
def test_what_is_in_no_table_is_refused(fn):
    assert_same_error(fn, sample((4, 2), torch.float32), wording=True)

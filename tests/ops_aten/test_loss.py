"""Losses against torch, with gradients; the pointwise ones too, which torch's decompositions define."""

import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

REDUCTIONS = ["none", "mean", "sum"]


def classes(shape, n, seed=1):
    return sample(shape, torch.int64, low=0, high=n, seed=seed)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "target_shape"),
    [((4, 5), (4,)), ((5,), ()), ((2, 5, 3, 4), (2, 3, 4)), ((2, 5, 3), (2, 3)), ((0, 5), (0,))],
)
def test_nll_loss(shape, target_shape, reduction):
    x, weight = sample(shape, torch.float64), sample((5,), torch.float64, low=0.5, high=2, seed=2)
    target = classes(target_shape, 5)
    for options in ({}, {"weight": weight}, {"weight": weight, "ignore_index": 2}, {"ignore_index": -100}):
        weights = options.get("weight")
        ignore = options.get("ignore_index", -100)
        assert_matches_torch(
            lambda x, t, w, ignore=ignore: F.nll_loss(x, t, w, ignore_index=ignore, reduction=reduction),
            x,
            target,
            weights,
        )
        assert_matches_torch(
            lambda x, t, ignore=ignore: F.nll_loss(x, t, ignore_index=ignore, reduction=reduction), x, target, grad=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(dtype):
    x, target = sample((4, 5), dtype), classes((4,), 5)
    target[1] = -100
    assert_matches_torch(F.cross_entropy, x, target, grad=True)
    assert_matches_torch(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), x.float(), target, grad=True)
    weight = sample((5,), torch.float32, low=0.5, high=2, seed=2)
    assert_matches_torch(lambda x, t: F.cross_entropy(x, t, weight.to(x.device)), x.float(), target, grad=True)


def test_ignored_targets_hide_infinities():
    x = torch.tensor([[float("-inf"), 0.0], [float("-inf"), 0.0]])
    assert_matches_torch(lambda x, t: F.nll_loss(x, t, ignore_index=0), x, torch.tensor([0, 1]), grad=True)
    assert_matches_torch(lambda x, t: F.nll_loss(x, t, ignore_index=0, reduction="sum"), x, torch.tensor([0, 0]))
    assert_matches_torch(lambda x, t: F.nll_loss(x, t, ignore_index=0), x, torch.tensor([0, 0]))  # NaN, as torch


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(p, reduction):
    x, weight = sample((4, 5), torch.float64), sample((5,), torch.float64, low=0.5, high=2, seed=2)

    def loss(x, target):
        return F.multi_margin_loss(x, target, p=p, margin=0.7, weight=weight.to(x.device), reduction=reduction)

    assert_matches_torch(loss, x, classes((4,), 5), grad=True)
    if reduction != "none":  # of shape () on CPU, (1,) by torch's meta kernel
        assert_matches_torch(loss, x[0], torch.tensor(3), grad=True)
    assert_matches_torch(loss, x[0], torch.tensor([3]), grad=True)


def test_a_hinge_at_its_corner():
    x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    assert_matches_torch(F.multi_margin_loss, x, torch.tensor([0]), grad=True)
    assert_matches_torch(F.multilabel_margin_loss, x, torch.tensor([[0, -1, -1]]), grad=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction):
    x = sample((3, 4), torch.float64)
    target = torch.tensor([[3, 0, -1, 1], [-1, 0, 0, 0], [0, 1, 2, 3]])
    assert_matches_torch(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), x, target, grad=True)
    if reduction != "none":  # of shape () on CPU, (1,) by torch's meta kernel
        assert_matches_torch(
            lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), x[0], target[0], grad=True
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.soft_margin_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
    ],
)
def test_pointwise_losses(loss, reduction):
    x = sample((3, 4), torch.float64, low=0.05, high=0.95)
    target = sample((3, 4), torch.float64, low=0.05, high=0.95, seed=1)
    if loss is F.kl_div and reduction == "mean":
        reduction = "batchmean"
    assert_matches_torch(lambda x, t: loss(x, t, reduction=reduction), x, target)
    assert_matches_torch(lambda x: loss(x, target.to(x.device), reduction=reduction), x, grad=True)


# -- CTC ------------------------------------------------------------------------------------------


def ctc(log_probs, targets, inputs, lengths, **options):
    return F.ctc_loss(log_probs, targets, inputs, lengths, **options)


LOG_PROBS = sample((9, 3, 5), torch.float64).log_softmax(-1)
PADDED = torch.tensor([[1, 1, 2, 4], [3, 2, 0, 0], [4, 0, 0, 0]])
INPUTS, LENGTHS = torch.tensor([9, 7, 4]), torch.tensor([4, 2, 1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["tensors", "ints", "concatenated"])
def test_ctc_loss(kind, reduction):
    if kind == "ints":
        lengths = (INPUTS.tolist(), LENGTHS.tolist())
        assert_matches_torch(lambda x, t: ctc(x, t, *lengths, reduction=reduction), LOG_PROBS, PADDED, grad=True)
        return
    targets = PADDED
    if kind == "concatenated":
        targets = torch.cat([row[:n] for row, n in zip(PADDED, LENGTHS, strict=True)])
    assert_matches_torch(ctc, LOG_PROBS, targets, INPUTS, LENGTHS, reduction=reduction)
    assert_matches_torch(
        lambda x, t: ctc(x, t, INPUTS.to(x.device), LENGTHS.to(x.device), reduction=reduction),
        LOG_PROBS,
        targets,
        grad=True,
    )


@pytest.mark.parametrize("run", [lambda f: f, torchax_core.jit, lambda f: torch.compile(f, backend="torchax")])
def test_ctc_loss_with_lengths_on_the_cpu(run):
    def loss(x, t):  # with torch.int32 too, and made inside
        return ctc(x, t, INPUTS, torch.tensor([4, 2, 1], dtype=torch.int32), zero_infinity=True)

    ours, cpu = LOG_PROBS.to("jax").requires_grad_(), LOG_PROBS.clone().requires_grad_()
    found, expected = run(loss)(ours, PADDED.to("jax")), loss(cpu, PADDED)
    torch.testing.assert_close(found.detach().cpu(), expected.detach())
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad.cpu(), cpu.grad)


def test_ctc_loss_with_another_blank_and_empty_targets():
    lengths = torch.tensor([3, 2, 0])
    targets = torch.tensor([[0, 0, 3], [3, 2, 0], [0, 0, 0]])
    assert_matches_torch(
        lambda x, t: ctc(x, t, [9, 7, 4], lengths.tolist(), blank=4, reduction="sum"), LOG_PROBS, targets, grad=True
    )


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss_of_impossible_targets(zero_infinity):
    # 1, 1 needs a blank in between: three steps
    targets, inputs, lengths = torch.tensor([[1, 1], [1, 2], [1, 1]]), [2, 2, 3], [2, 2, 2]
    assert_matches_torch(
        lambda x, t: ctc(x, t, inputs, lengths, zero_infinity=zero_infinity, reduction="none"),
        LOG_PROBS,
        targets,
        grad=True,
    )


def test_ctc_loss_without_a_batch():
    assert_matches_torch(
        lambda x, t: ctc(x, t, torch.tensor(9), torch.tensor(3)), LOG_PROBS[:, 0], torch.tensor([1, 1, 2]), grad=True
    )


@pytest.mark.usefixtures("new_signatures")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, torch.tensor([0, 4, -100], device=x.device)),
        lambda x: F.nll_loss(x, torch.tensor([0, -1, 2], device=x.device)),
        lambda x: F.multi_margin_loss(x, torch.tensor([0, 4, 1], device=x.device)),
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 4, -1, 1]] * 3, device=x.device)),
    ],
)
def test_targets_that_are_no_class_are_refused(loss, requires_grad):
    assert_same_error(loss, sample((3, 4), torch.float32).requires_grad_(requires_grad), wording=True)

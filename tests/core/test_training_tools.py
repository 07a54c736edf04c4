"""What training loops are made of besides layers and optimizers, against CPU torch: torch.nn.utils, GradScaler, activation
checkpoints, hooks, anomaly detection, and torch.func over modules."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import rnn as packing
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from torchax_core.testing import assert_same_result, moved


def compare(run, *args, rtol=1e-5, atol=1e-5):
    """`run(device, *args)` on the device must give what it gives on the CPU."""
    results = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        results.append(run(device, *moved(args, device)))
    assert_same_result(results[1], results[0], rtol=rtol, atol=atol, on="jax")


def on(device, module):
    """The module, made on the CPU so that its weights are the same, and moved."""
    return module.to(device)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def backward(module, x):
    """The result for `x`, and the gradients of the parameters."""
    result = module(x)
    result.square().sum().backward()
    return result.detach(), [p.grad for p in module.parameters()]


X = torch.linspace(-1, 1, 6).reshape(2, 3)


# -- torch.nn.utils ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_norms(norm_type, foreach):
    def run(device, x):
        module = on(device, mlp())
        backward(module, x)
        total = nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type, error_if_nonfinite=True, foreach=foreach)
        again = nn.utils.get_total_norm([p.grad for p in module.parameters()], norm_type, foreach=foreach)
        nn.utils.clip_grads_with_norm_(module.parameters(), 0.1, again, foreach=foreach)
        return total, again, [p.grad for p in module.parameters()]

    compare(run, X)


def test_clipping_values_and_what_is_not_finite():
    def run(device, x):
        module = on(device, mlp())
        backward(module, x)
        nn.utils.clip_grad_value_(module.parameters(), 0.1)
        clipped = [p.grad.clone() for p in module.parameters()]
        module[0].bias.grad[0] = float("nan")
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
        return clipped

    compare(run, X)


@pytest.mark.parametrize("parametrize", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(parametrize):
    def run(device, x):
        layer = on(device, getattr(parametrizations, parametrize)(nn.Linear(3, 3)))
        found = backward(layer, x)
        layer.eval()
        return found, layer.weight.detach(), list(layer.state_dict())

    compare(run, X, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_older_norms_of_weights():
    def run(device, x):
        first = nn.utils.weight_norm(on(device, nn.Linear(3, 4)))
        second = on(device, nn.utils.spectral_norm(nn.Linear(3, 4)))
        removed = nn.utils.remove_weight_norm(nn.utils.weight_norm(on(device, nn.Linear(3, 4))))
        return backward(first, x), backward(second, x), removed.weight.detach()

    compare(run, X)


def test_a_parametrization_of_ones_own():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

        def right_inverse(self, weight):
            return weight.triu()

    def run(device, x):
        layer = on(device, nn.Linear(3, 3))
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        with nn.utils.parametrize.cached():
            found = backward(layer, x)
        layer.weight = torch.ones(3, 3, device=device)
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        return found, layer.weight.detach()

    compare(run, X)


def test_packed_sequences():
    def run(device, x):
        packed = packing.pack_padded_sequence(x, torch.tensor([2, 4, 1]), batch_first=True, enforce_sorted=False)
        padded, lengths = packing.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0, total_length=5)
        parts = packing.unpack_sequence(packing.pack_sequence([x[0, :2], x[1, :1]]))
        return packed.data, padded, lengths.to(device), parts, packing.pad_sequence(parts, padding_side="left")

    compare(run, torch.arange(24.0).reshape(3, 4, 2))


def test_parameters_as_one_vector():
    def run(device, x):
        module = on(device, mlp())
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 2, module.parameters())
        return vector.detach(), [p.detach() for p in module.parameters()]

    compare(run, X)


def test_pruning():
    def run(device, x):
        module = on(device, mlp())
        prune.l1_unstructured(module[0], "weight", amount=0.5)
        prune.ln_structured(module[2], "weight", amount=1, n=2, dim=0)
        prune.global_unstructured([(module[0], "weight"), (module[2], "bias")], prune.L1Unstructured, amount=3)
        found = backward(module, x)
        prune.remove(module[0], "weight")
        return found, module[0].weight.detach(), module[2].weight_mask

    compare(run, X)


def test_fused_batch_norms():
    def run(device, x):
        layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
        layers[1].running_mean.fill_(0.3)
        layers = on(device, layers).eval()
        fused = nn.utils.fuse_conv_bn_eval(*layers)
        return layers(x).detach(), fused(x).detach()

    compare(run, torch.randn(1, 2, 4, 4))


# -- loss scaling ------------------------------------------------------------------------------------------------------


def test_grad_scaler_steps_where_gradients_are_finite():
    """CPU torch's own scaler, on a CPU model, is what ours is compared with."""

    def run(device, x):
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        module = on(device, mlp())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=False):
                loss = module(x).square().sum() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        other = torch.amp.GradScaler(device)
        other.load_state_dict(scaler.state_dict())
        return scales, other.get_scale(), [p.detach() for p in module.parameters()]

    compare(run, X)


# -- checkpoints of activations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant):
    def run(device, x):
        module = on(device, mlp())
        x.requires_grad_()
        calls = []
        module[1].register_forward_hook(lambda *_: calls.append(1))
        result = checkpoint(module, x, use_reentrant=reentrant, preserve_rng_state=True)
        result = result + checkpoint_sequential(module, 2, x, use_reentrant=reentrant)
        result.square().sum().backward()
        return result.detach(), x.grad, [p.grad for p in module.parameters()], len(calls)

    compare(run, X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same_numbers_again(reentrant):
    x = torch.ones(200, device="jax", requires_grad=True)
    result = checkpoint(lambda x: nn.functional.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
    result.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * result.detach().cpu())
    assert set(result.tolist()) == {0.0, 2.0}


# -- hooks and anomalies -----------------------------------------------------------------------------------------------


def test_hooks():
    def run(device, x):
        module = on(device, mlp())
        seen = {}  # not a list: in what order leaves get their gradients is the engine's affair

        def see(name, *results):
            seen[name] = [r.detach().clone() for r in results if r is not None]

        module[0].register_forward_pre_hook(lambda m, args: see("before", *args))
        module[0].register_forward_hook(lambda m, args, result: see("after", result) or result * 2)
        module[2].register_full_backward_pre_hook(lambda m, grads: see("backward before", *grads))
        module[2].register_full_backward_hook(lambda m, ins, outs: see("backward", *ins, *outs) or (ins[0] * 3,))
        module[0].weight.register_hook(lambda grad: see("tensor", grad) or grad + 1)
        module[0].bias.register_post_accumulate_grad_hook(lambda p: see("accumulated", p.grad))
        middle = module[0](x)
        middle.retain_grad()
        result = module[2](module[1](middle))
        result.grad_fn.register_hook(lambda ins, outs: see("node", *outs))
        result.square().sum().backward()
        return sorted(seen.items()), middle.grad, [p.grad for p in module.parameters()]

    compare(run, X)


def test_hooks_on_saved_tensors():
    def run(device, x):
        module = on(device, mlp())
        kept = []

        def pack(tensor):
            kept.append(tuple(tensor.shape))
            return tensor.double()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
            found = backward(module, x)
        with torch.autograd.graph.save_on_cpu():
            return found, backward(module, x), len(kept) > 2

    compare(run, X)


def test_anomaly_detection_names_the_op():
    def wrong(device):
        x = torch.tensor([-1.0, 1.0], device=device, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            (x.sqrt() * 0).sum().backward()

    for device in ("cpu", "jax"):
        with pytest.warns(UserWarning, match="Error detected in SqrtBackward0"), pytest.raises(RuntimeError) as raised:
            wrong(device)
        assert "Function 'SqrtBackward0' returned nan values in its 0th output" in str(raised.value)


# -- torch.func over modules -------------------------------------------------------------------------------------------


def test_an_ensemble_by_vmap():
    def run(device, x):
        models = [on(device, mlp()) for _ in range(3)]
        params, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")

        def call(params, buffers, x):
            return torch.func.functional_call(base, (params, buffers), (x,))

        over_models = torch.func.vmap(call, in_dims=(0, 0, None))(params, buffers, x)
        return over_models.detach(), torch.func.vmap(call)(params, buffers, torch.stack([x, 2 * x, 3 * x])).detach()

    compare(run, X)


def test_gradients_per_sample():
    def run(device, x):
        module = on(device, mlp())
        params = {name: p.detach() for name, p in module.named_parameters()}

        def loss(params, row):
            return torch.func.functional_call(module, params, (row[None],)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        one_by_one = [torch.func.grad(loss)(params, row) for row in x]
        for name, grads in per_sample.items():
            torch.testing.assert_close(grads, torch.stack([grad[name] for grad in one_by_one]))
        return per_sample, torch.func.grad_and_value(loss)(params, x[0])

    compare(run, X)


@pytest.mark.filterwarnings("ignore:.*")  # linearize's, of what torch itself does
def test_jacobians_and_hessians():
    def run(device, x):
        module = on(device, mlp())

        def call(row):
            return module(row)

        forward, reverse = torch.func.jacfwd(call)(x[0]), torch.func.jacrev(call)(x[0])
        torch.testing.assert_close(forward, reverse)
        hessian = torch.func.hessian(lambda row: call(row).square().sum())(x[0])
        value, pull = torch.func.vjp(call, x[0])
        linear = torch.func.linearize(call, x[0])[1](x[1])
        batched = torch.func.vmap(torch.func.jacrev(call))(x)
        tangent = torch.func.jvp(call, (x[0],), (x[1],))
        results = reverse, hessian, value, pull(x[1]), linear, batched, tangent
        return pytree.tree_map(torch.Tensor.detach, results)

    compare(run, X)

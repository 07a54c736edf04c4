"""torchax_ops_jtorch.rnn against torch's own layers: values, gradients, packed sequences, dropout."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import torchax_core
from torchax_core.testing import assert_matches_torch, sample

INPUTS, HIDDEN, BATCH, TIME = 3, 5, 4, 7

LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "batch_first": True, "bias": False},
]


def layer(name, dtype=torch.float64, **options):
    return LAYERS[name](INPUTS, HIDDEN, **options).to(dtype)


def inputs(module, dtype=torch.float64):
    shape = (BATCH, TIME, INPUTS) if module.batch_first else (TIME, BATCH, INPUTS)
    return sample(shape, dtype, seed=1)


def states(module, dtype=torch.float64):
    """A first state for a layer: a tensor, or a pair for an LSTM."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = sample((count, BATCH, module.proj_size or HIDDEN), dtype, low=-1, high=1, seed=2)
    c = sample((count, BATCH, HIDDEN), dtype, low=-1, high=1, seed=3)
    return (h, c) if isinstance(module, nn.LSTM) else h


def of_parameters(module):
    """The module as a function of its input, its state and its weights, so that all of them get gradients."""
    names = [name for name, _ in module.named_parameters()]

    def run(x, state, *weights):
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, state))

    return run, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, options):
    module = layer(name, **options)
    run, weights = of_parameters(module)
    assert_matches_torch(run, inputs(module), states(module), *weights, grad=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_lstm_with_projections():
    module = layer("lstm", num_layers=2, bidirectional=True, proj_size=2)
    run, weights = of_parameters(module)
    assert_matches_torch(run, inputs(module), states(module), *weights, grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    tolerance = {} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for name in ("lstm", "gru"):
        run, weights = of_parameters(layer(name, dtype))
        assert_matches_torch(run, inputs(layer(name), dtype), None, *weights, **tolerance)


def test_without_a_first_state_or_a_batch():
    module = layer("lstm")
    run, weights = of_parameters(module)
    for x in (inputs(module), inputs(module)[:, 0], inputs(module)[:1]):
        assert_matches_torch(run, x, None, *weights)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_packed(name, options):
    module = layer(name, **options)
    lengths = torch.tensor([TIME, 2, 5, 5])

    def run(x, state, *weights):
        names = [n for n, _ in module.named_parameters()]
        packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
        parameters = dict(zip(names, weights, strict=True))
        packed, state = torch.func.functional_call(module, parameters, (packed, state))
        return pad_packed_sequence(packed, batch_first=module.batch_first)[0], state

    weights = [p.detach() for p in module.parameters()]
    assert_matches_torch(run, inputs(module), states(module), *weights, grad=name in ("lstm", "gru"))


def test_packed_without_padding_first():
    module = layer("gru").to("jax")
    with torch.no_grad():
        for lengths in ((4, 2, 1), (4, 3), (3, 3, 1)):
            packed = pack_sequence([sample((n, INPUTS), torch.float64, seed=n) for n in lengths])
            expected = copy.deepcopy(module).cpu()(packed)[1]
            torch.testing.assert_close(module(packed.to("jax"))[1].cpu(), expected)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *a: nn.RNNCell(*a, nonlinearity="relu")])
def test_cells(cell):
    module = cell(INPUTS, HIDDEN).double()
    h, c = (sample((BATCH, HIDDEN), torch.float64, seed=seed) for seed in (2, 3))
    run, weights = of_parameters(module)
    state = (h, c) if isinstance(module, nn.LSTMCell) else h
    assert_matches_torch(run, sample((BATCH, INPUTS), torch.float64, seed=1), state, *weights, grad=True)


def test_second_derivatives():
    def penalty(x, *weights):
        module = layer("gru")
        names = [n for n, _ in module.named_parameters()]
        out, _ = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return gradient.square().sum()

    def gradients(x, *weights):
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        return torch.autograd.grad(penalty(*leaves), leaves)

    module = layer("gru")
    assert_matches_torch(gradients, inputs(module), *[p.detach() for p in module.parameters()])


def test_dropout_between_layers():
    torch.manual_seed(1)
    module = layer("lstm", num_layers=2, dropout=0.5).to("jax")
    x = inputs(module).to("jax")
    with torch.no_grad():
        torch.manual_seed(2)
        one, other = module(x)[0].cpu(), module(x)[0].cpu()
        torch.manual_seed(2)
        again = module(x)[0].cpu()
        module.eval()
        plain = module(x)[0].cpu()
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert not torch.equal(one, plain)
    torch.testing.assert_close(plain, copy.deepcopy(module).cpu()(x.cpu())[0].detach())


def test_dropout_keeps_the_mean_and_can_drop_everything():
    module = layer("rnn_relu", num_layers=2, dropout=0.25, bias=False).to("jax")
    x = inputs(module).to("jax")
    with torch.no_grad():
        for weight in module.parameters():  # what the second layer adds up is the first one's dropped output
            weight.abs_()
        module.weight_hh_l1.zero_()
        x = x.abs()
        mean = torch.stack([module(x)[0] for _ in range(300)]).mean(0).cpu()
        module.eval()
        torch.testing.assert_close(mean, module(x)[0].cpu(), rtol=0.15, atol=0.1)
        module.train()
        module.dropout = 1.0
        assert module(x)[0].abs().max().item() == 0


def test_training_step_under_jit():
    torch.manual_seed(0)
    module = layer("lstm", torch.float32, num_layers=2, batch_first=True)
    head = nn.Linear(HIDDEN, 2)
    x, y = inputs(module, torch.float32), torch.tensor([0, 1, 1, 0])

    def train(module, head, x, y, wrap):
        optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.1)

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(head(module(x)[0][:, -1]), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [step(x, y).item() for _ in range(5)]

    expected = train(copy.deepcopy(module), copy.deepcopy(head), x, y, lambda f: f)
    ours = train(module.to("jax"), head.to("jax"), x.to("jax"), y.to("jax"), torchax_core.jit)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_autocast_runs_the_whole_layer_in_half():
    module = layer("lstm", torch.float32).to("jax")
    with torch.autocast("jax", dtype=torch.bfloat16):
        out, (_, c) = module(inputs(module, torch.float32).to("jax"))
        out.float().sum().backward()
    assert out.dtype == c.dtype == torch.bfloat16
    assert module.weight_ih_l0.grad.dtype == torch.float32


def test_the_layer_is_one_op():
    assert "torchax_ops_jtorch" in str(torchax_core.default_env().explain("aten::lstm.input"))


def test_errors_are_torchs():
    module = layer("gru").to("jax")
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        module(inputs(module).to("jax"), torch.zeros(1, 2, HIDDEN, dtype=torch.float64, device="jax"))
    with pytest.raises(RuntimeError):
        module(sample((TIME, BATCH, INPUTS + 1), torch.float64).to("jax"))

"""rnn.py against CPU torch: the cells that torch fuses on accelerators, through their modules and by themselves."""

import pytest
import torch
from torch import nn

import torchax_core
from torchax_core.testing import assert_matches_torch, sample


@pytest.fixture
def without_jtorch():
    """An environment in which torch makes the layers of the fused cells."""
    with torchax_core.Environment(torchax_core.Config(blocked_packs=("jtorch",))):
        yield


def of_weights(cell):
    """The module as a function of its input, its states and its weights, so that all of them get gradients."""
    names = [name for name, _ in cell.named_parameters()]

    def run(x, states, *weights):
        return torch.func.functional_call(cell, dict(zip(names, weights, strict=True)), (x, states))

    return run, [p.detach() for p in cell.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells(without_jtorch, cell, bias):
    module = cell(3, 5, bias=bias).double()
    run, weights = of_weights(module)
    state = sample((4, 5), torch.float64, low=-1, high=1, seed=1)
    states = (state, state.flip(0)) if cell is nn.LSTMCell else state
    assert_matches_torch(run, sample((4, 3), torch.float64), states, *weights, grad=True)


def test_only_the_cell_state_is_used(without_jtorch):
    module = nn.LSTMCell(3, 5).double()
    run, weights = of_weights(module)
    states = (sample((4, 5), torch.float64, seed=1), sample((4, 5), torch.float64, seed=2))
    assert_matches_torch(lambda *a: run(*a)[1], sample((4, 3), torch.float64), states, *weights, grad=True)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_layers(without_jtorch, layer):
    module = layer(3, 5, num_layers=2).double()
    run, weights = of_weights(module)
    h = sample((2, 4, 5), torch.float64, low=-1, high=1, seed=1)
    states = (h, h.flip(0)) if layer is nn.LSTM else h
    assert_matches_torch(run, sample((3, 4, 3), torch.float64), states, *weights, grad=True)

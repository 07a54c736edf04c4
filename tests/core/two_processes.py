"""torchax_core.distributed over two processes with four devices each: what one of them does. Run by test_distributed.py."""

import sys
from pathlib import Path

import jax
import sharded_gpt2 as example
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import torchax_core
from torchax_core import distributed
from torchax_core.errors import ConversionError

rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

LAYOUT = example.LAYOUTS["fsdp and tensor parallel"]
mesh = jax.make_mesh(tuple(LAYOUT.mesh.values()), tuple(LAYOUT.mesh), axis_types=(jax.sharding.AxisType.Auto,) * 2)
assert len(jax.local_devices()) == 4 and mesh.devices.size == 8


def make_model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def losses(model, batch, compile=lambda step: step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @compile
    def step(tokens):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return [step(batch).item() for _ in range(3)], optimizer


tokens = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(1))
alone = make_model()
expected, _ = losses(alone, tokens)
model = distributed.shard_module(make_model(), mesh, LAYOUT.rules)
batch = distributed.distribute_tensor(tokens, mesh, LAYOUT.batch)
found, optimizer = losses(model, batch, torchax_core.jit)
torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
assert found[2] < found[0]

weight = model.transformer.h[0].mlp.c_fc.weight
for tensor in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
    assert tensor.shape == (32, 128) and tensor.jax().sharding.spec == jax.P("dp", "tp")
    shards = distributed.local_shards(tensor)
    assert [s.device for s in shards] == jax.local_devices() and all(s.tensor.shape == (16, 32) for s in shards)
whole = distributed.full_tensor(weight.detach())
torch.testing.assert_close(whole.cpu(), alone.transformer.h[0].mlp.c_fc.weight.detach(), rtol=1e-3, atol=1e-3)
assert abs(weight.sum().item() - whole.sum().item()) < 1e-3

# made in parts, by one program on all devices
with torch.device("meta"):
    made = torch.nn.Linear(8, 16)
distributed.shard_module(made, mesh, {"weight": jax.P("tp")})
assert distributed.local_shards(made.weight)[0].tensor.shape == (4, 8)
assert 0 < distributed.full_tensor(made.weight).abs().max().item() <= 8**-0.5

# what this process cannot see
for look in (weight.cpu, weight.tolist, lambda: weight.detach().numpy(force=True)):
    try:
        look()
    except ConversionError as error:
        assert "devices of several processes" in str(error) and "full_tensor" in str(error), error
    else:
        raise AssertionError("a process has seen what lies on another's devices")
assert "tensor(<on 8 devices of 2 processes, " in repr(weight) and "device='jax:0', requires_grad=True)" in repr(weight)
(folder / str(rank)).write_text(repr(found))

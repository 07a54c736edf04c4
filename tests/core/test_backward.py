"""torchax_core.backward: in which thread a backward runs."""

import subprocess
import sys
import threading

import pytest
import torch


@pytest.mark.parametrize("way", ["backward", "torch.autograd.backward", "grad"])
def test_backwards_run_in_the_thread_that_asks(way: str) -> None:
    x = torch.ones(3, device="jax", requires_grad=True)
    threads = []
    x.register_hook(lambda gradient: threads.append(threading.get_ident()))
    loss = (x * x).sum()
    if way == "grad":
        torch.autograd.grad(loss, x)
    elif way == "backward":
        loss.backward()
    else:
        torch.autograd.backward([loss, (x * 2).sum()])
    assert threads == [threading.get_ident()]


def test_a_backward_on_the_cpu_before_the_import() -> None:
    program = """
import torch
torch.ones(2, requires_grad=True).sum().backward()
import torchax_core
x = torch.ones(3, device="jax", requires_grad=True)
(x * 2).sum().backward()
print(x.grad.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]", done.stderr[-2000:]

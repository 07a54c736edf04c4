"""torchax_ops_c10d.collectives outside of jax.shard_map, on one device; inside: collectives_on_eight_devices.py."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from torchax_core import spanning
from torchax_core.errors import ShapeError, TorchaxError
from torchax_ops_c10d import CollectiveError, backend, map_group

sys.path.insert(0, str(Path(__file__).parent))
import collectives_table

c10d = torch.ops._c10d_functional


def test_on_eight_devices():
    # the number of devices is fixed once jax has started, as it has here
    flags = "--xla_force_host_platform_device_count=8"
    scripts = [str(Path(__file__).with_name(f"{what}_on_eight_devices.py")) for what in ("collectives", "overrides")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *scripts],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("place, members", [("devices", 4), ("processes", 2)])
def test_as_gloo(place, members):
    """Each call of torch.distributed gives what gloo gives; `collectives_table.py --table` compares more of them."""
    _, _, differences = collectives_table.compare([(place, members)], full=False)
    assert len(differences[f"{place} {members}"]) > 70
    assert {key: fault for column in differences.values() for key, fault in column.items() if fault is not None} == {}
    if place == "processes":
        assert len(differences["in jit 2"]) > 60


def test_a_group_of_one_is_the_identity():
    x = torch.arange(6.0, device="jax").reshape(3, 2)
    for result in (
        c10d.all_gather_into_tensor(x, 1, "solo"),
        c10d.reduce_scatter_tensor(x, "sum", 1, "solo"),
        c10d.reduce_scatter_tensor(x, "max", 1, "solo"),
        c10d.all_to_all_single(x, [3], [3], "solo"),
        c10d.wait_tensor(x),
        *c10d.all_gather_into_tensor_coalesced([x, x], 1, "solo"),
        *c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 1, "solo"),
    ):
        assert result.cpu().tolist() == x.cpu().tolist()
        assert result is not x and result.dtype == x.dtype
    assert c10d.all_gather_into_tensor(torch.tensor(5.0, device="jax"), 1, "solo").shape == (1,)


def test_results_are_copies():
    x = torch.ones(2, device="jax")
    c10d.wait_tensor(x).zero_()
    assert x.cpu().tolist() == [1, 1]


def test_a_larger_group_says_what_to_do():
    x = torch.ones(4, device="jax")
    with pytest.raises(CollectiveError, match=r"'wide' has 4 members.*map_group\('wide', 'axis name'\)"):
        c10d.all_gather_into_tensor(x, 4, "wide")
    with pytest.raises(CollectiveError, match="'wide' has 2 members"):
        c10d.all_to_all_single(x, [2, 2], [2, 2], "wide")
    with pytest.raises(CollectiveError, match="'nobody' is unknown to torch.distributed"):
        funcol.all_reduce(x, "sum", "nobody")
    assert issubclass(CollectiveError, TorchaxError)


def test_a_mapped_group_out_of_scope_says_so():
    map_group("mapped, out of scope", "some_axis")
    with pytest.raises(CollectiveError, match="'some_axis', which is not in scope here.*jax.shard_map"):
        c10d.all_reduce(torch.ones(4, device="jax"), "sum", "mapped, out of scope")


def test_a_group_keeps_its_axis():
    map_group("kept", "a")
    map_group("kept", "a")
    with pytest.raises(CollectiveError, match="'kept' is the mesh axis 'a' already, and cannot become 'b'"):
        map_group("kept", "b")


def test_unknown_reductions_and_point_to_point_raise():
    x = torch.ones(4, device="jax")
    with pytest.raises(CollectiveError, match="`reduce_op` must be one of sum, avg"):
        c10d.reduce_scatter_tensor(x, "median", 1, "solo")
    with pytest.raises(CollectiveError, match="comes with a factor"):
        c10d.reduce_scatter_tensor(x, "premul_sum", 1, "solo")
    with pytest.raises(CollectiveError, match="ppermute"):
        c10d.isend(x, 1, 0, "solo")
    with pytest.raises(CollectiveError, match="ppermute"):
        c10d.irecv(x, 1, 0, "solo")
    with pytest.raises(CollectiveError, match="ppermute"):
        c10d.batch_p2p_ops(["isend"], [1], [0], [x], "solo")


def test_a_world_of_one():
    """init_process_group("jax"), with one process, whose collectives are the identity."""
    dist.init_process_group("jax", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, out = torch.arange(3.0, device="jax"), torch.zeros(3, device="jax")
        dist.all_reduce(x, dist.ReduceOp.AVG)
        dist.all_to_all_single(out, x, [3], [3])
        dist.reduce(x, 0)
        dist.broadcast(x, 0)
        dist.barrier()
        gathered: list = [None]
        dist.all_gather_object(gathered, "me")
        assert gathered == ["me"]
        assert x.cpu().tolist() == out.cpu().tolist() == [0, 1, 2]
        with pytest.raises(ShapeError, match="must have one tensor for each of the 1 members, but has 2"):
            dist.all_gather([out, out], x)
        model = torch.nn.Linear(3, 2).to("jax")
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            model.zero_grad()
            parallel = torch.nn.parallel.DistributedDataParallel(model, **options)
            parallel(x.view(1, 3)).sum().backward()
            assert model.weight.grad.tolist() == [[0, 1, 2]] * 2
        with pytest.raises(CollectiveError, match="'band' is not defined for torch.float32"):
            dist.all_reduce(x, dist.ReduceOp.BAND)
    finally:
        dist.destroy_process_group()


def test_jax_must_not_have_started():
    torch.zeros(1, device="jax")
    options = SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=2, timeout=timedelta(seconds=5), global_ranks_in_group=[]
    )
    with pytest.raises(CollectiveError, match="must come before the first use of any device"):
        backend._start_jax(options)


def test_members_wait_for_each_other_before_they_send():
    """For what comes late to a group's first collective, or compiles longer than the others, gloo does not wait long."""
    store, done = dist.HashStore(), []
    groups = [spanning.Group(range(2), rank, store) for rank in range(2)]

    def late() -> None:
        for group_waits in (groups[1].meet, lambda: groups[1].agree("f", ["psum"], lambda: done.append("compiled"))):
            time.sleep(0.3)
            done.append("late")
            group_waits()

    thread = threading.Thread(target=late)
    thread.start()
    groups[0].meet()
    assert done[:1] == ["late"]
    groups[0].meet()
    groups[0].agree("f", ["psum"], lambda: None)
    assert done == ["late", "late", "compiled"]
    groups[0].agree("f", ["psum"], lambda: done.append("again"))
    thread.join()
    assert done == ["late", "late", "compiled"]


def test_importing_the_core_starts_no_backend_of_jax():
    code = "import torchax_core, torchax_ops_c10d; from jax._src import xla_bridge as x; assert not x.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

"""Cases of whole training loops, and of overridden collectives: as those of collectives_cases.py, between processes only."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives_cases import HALF_SUMS, ROUNDED, Case, Tensors, all_gather, all_reduce, functional_all_reduce
from jitted_cases import constants, in_jit, jitted
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

# -- data parallel training ----------------------------------------------------------------------


class Branching(torch.nn.Module):
    """Two layers, a batch norm with buffers, and a branch that only some calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.branch = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.branch(x) if branch else x)


def _trained(model: torch.nn.Module, x: torch.Tensor, step: Callable[[torch.Tensor, int], None]) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        losses.append(step(x + i, i))
        optimizer.step()
    return [torch.stack([loss.detach() for loss in losses]), *model.parameters(), *model.buffers()]


def ddp(options: dict[str, object], x: torch.Tensor, n: int) -> Tensors:
    """DistributedDataParallel, with a different batch on each rank."""
    torch.manual_seed(dist.get_rank())  # DDP broadcasts rank 0's weights
    model = Branching().to(x.device)
    options = dict(options)
    hook, accumulate = options.pop("hook", None), options.pop("accumulate", None)
    branches: Callable[[int], bool] = options.pop("branches", lambda i: True)  # type: ignore[assignment]
    parallel = torch.nn.parallel.DistributedDataParallel(model, **options)
    if hook is not None:
        parallel.register_comm_hook(None, hook)

    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        if accumulate:
            with parallel.no_sync():
                parallel(x * 2, branches(i)).square().mean().backward()
        loss = parallel(x, branches(i)).square().mean()
        loss.backward()
        return loss

    return _trained(model, x, step)


def some_ranks(i: int) -> bool:
    """In the first step all take the branch, in the second nobody, in the third rank 0."""
    return i == 0 or (i == 2 and dist.get_rank() == 0)


def average_by_hand(x: torch.Tensor, n: int) -> Tensors:
    """torchax_ops_c10d.average_gradients; under gloo, DistributedDataParallel. Not all ranks take the branch in all steps."""
    torch.manual_seed(dist.get_rank())
    model = Branching().to(x.device)
    if x.device.type == "cpu":
        trained: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=True
        )
        average = None
    else:
        from torchax_ops_c10d import average_gradients, broadcast_parameters

        broadcast_parameters(model)
        trained, average = model, average_gradients

    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        loss = trained(x, some_ranks(i)).square().mean()
        loss.backward()
        if average is not None:
            average(model)
        return loss

    return _trained(model, x, step)


def sync_batch_norm(x: torch.Tensor, n: int) -> Tensors:
    """SyncBatchNorm, eager and jitted. It has no CPU kernels: under gloo, batch norm of all ranks' inputs together."""
    torch.manual_seed(0)
    norm, rank = torch.nn.BatchNorm1d(3).to(x.device), dist.get_rank()

    def step(x: torch.Tensor, norm: torch.nn.Module = norm) -> torch.Tensor:
        out = norm(x)
        out.pow(3).sum().backward()
        return out.detach()

    if x.device.type == "cpu":
        x = torch.cat(all_gather(x, n)).requires_grad_()
        out = step(x)
        return [out.chunk(n)[rank], x.grad.chunk(n)[rank], norm.running_mean, norm.running_var] * 2  # type: ignore[union-attr]
    found: Tensors = []
    for wrap in (lambda f: f, functools.partial(jitted, x.device)):
        mine = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
        x = x.detach().requires_grad_()
        found += [wrap(functools.partial(step, norm=mine))(x), x.grad, mine.running_mean, mine.running_var]
    return found


def whole_step(options: dict[str, object], x: torch.Tensor, n: int) -> Tensors:
    """A training step as one program: DistributedDataParallel's forward, backward, and the optimizer."""
    torch.manual_seed(dist.get_rank())
    parallel = torch.nn.parallel.DistributedDataParallel(Branching().to(x.device), **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = parallel(x, True).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = jitted(x.device, step)
    losses = torch.stack([run(x + i) for i in range(3)])
    return [losses, *parallel.parameters(), *parallel.buffers()]


# -- sharded weights -----------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Language(torch.nn.Module):
    """Two layers, an odd vocabulary (weights that do not divide), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.blocks = torch.nn.ModuleList([Block(8) for _ in range(2)])
        self.head = torch.nn.Linear(8, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _language(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 13, (8, 7), generator=torch.Generator().manual_seed(1)).to(device)


def _model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return Language().to(device)


def _as_alone(found: Tensors, device: torch.device, clip: float | None = None) -> Tensors:
    """Under gloo, whose results are the reference: they are those of one process that trains by itself."""
    if device.type == "cpu":
        for ours, alone in zip(found, _steps(_model(device), _tokens(device), clip), strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)
    return found


def _steps(
    model: torch.nn.Module, tokens: torch.Tensor, clip: float | None = None, sync: Callable[[bool], None] = bool
) -> Tensors:
    """Losses and weights of two steps, each over two halves of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for i, part in enumerate(tokens.chunk(2)):
            sync(i == 1)
            loss = _language(model, part) / 2
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [torch.stack(losses), *whole]


def sharded(options: dict[str, object], x: torch.Tensor, n: int) -> Tensors:
    """torch.distributed.fsdp.fully_shard. On two ranks, this one's batches are the rows of one device's."""
    from torch.distributed.fsdp import fully_shard

    options = dict(options)
    clip, delay = options.pop("clip", None), options.pop("delay", False)
    tokens = _tokens(x.device)

    def make(frozen: bool = False) -> torch.nn.Module:
        model = _model(x.device)
        if frozen:  # weights are gathered ahead for a backward that does not come
            model.embedding.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    model = make()

    def sync(now: bool) -> None:
        model.set_requires_gradient_sync(now or not delay)

    mine = torch.cat([part.chunk(n)[dist.get_rank()] for part in tokens.chunk(2)])
    found = _steps(model, mine, clip, sync)
    dist.all_reduce(found[0])
    found[0] /= n
    if x.device.type == "jax" and delay:
        _in_jit(functools.partial(make, True), mine, delay)
        _refused_in_jit(make(), mine)
    return _as_alone(found, x.device, clip)


def parallelized(x: torch.Tensor, n: int) -> Tensors:
    """DTensor, and torch.distributed.tensor.parallel.parallelize_module, whose losses are those of one device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(x.device.type, (n,))
    model, tokens = _model(x.device), _tokens(x.device)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = _as_alone(_steps(model, tokens), x.device)
    if x.device.type == "jax":
        _in_jit(functools.partial(copy.deepcopy, model), tokens)
    whole = torch.arange(10.0, device=x.device).reshape(5, 2)
    split = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    sums = DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    (split.square().sum() * 3).backward()
    return [*found, split.grad.full_tensor(), sums]


def compiled(x: torch.Tensor, n: int) -> Tensors:
    """Sharded, split and replicated models under torch.compile, on device "jax"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tokens, mesh = _tokens(x.device), init_device_mesh(x.device.type, (n,))
    shards = torch.cat([part.chunk(n)[dist.get_rank()] for part in tokens.chunk(2)])

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def split(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    found: list[torch.Tensor] = []
    for spread, mine in ((shard, shards), (split, tokens), (torch.nn.parallel.DistributedDataParallel, shards)):
        model = spread(_model(x.device))
        if x.device.type == "jax":
            model = torch.compile(model, backend="torchax")
        losses, *weights = _steps(model, mine)
        if mine is shards:
            dist.all_reduce(losses)
            losses /= n
        found += _as_alone([losses, *weights], x.device)
    return found


def _in_jit(make: Callable[[], torch.nn.Module], tokens: torch.Tensor, delay: bool = False) -> None:
    """A step over sharded weights under torchax_core.jit does what it does without, and is traced once, though the model runs
    outside, too. delay: gradients are added up over two backwards before they are sent."""
    after = []
    for wrap in (lambda f: f, functools.partial(jitted, tokens.device)):
        model = make()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)

        def step(tokens: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            if delay:
                model.set_requires_gradient_sync(False)
                _language(model, tokens.flip(0)).backward()
                model.set_requires_gradient_sync(True)
            loss = _language(model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if hasattr(p, "placements")], 0.5, foreach=False
            )
            optimizer.step()
            return loss.detach()

        run, losses = wrap(step), []
        for _ in range(3):
            losses.append(run(tokens))
            with torch.no_grad():
                losses.append(_language(model, tokens))
        assert not hasattr(run, "compilations") or len(run.compilations) == 1, run.explain()
        if delay:
            model.reshard()
        after.append([*losses, *(p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())])
    for found, expected in zip(after[1], after[0], strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu(), rtol=1e-4, atol=1e-5)


def _refused_in_jit(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """What a program cannot do with gradients of sharded modules: hand them on, to a backward outside or to the next call."""
    from torchax_core.errors import CollectiveError

    def unsent(tokens: torch.Tensor) -> None:
        model.set_requires_gradient_sync(False)
        _language(model, tokens).backward()

    for refused, words in (
        (functools.partial(_language, model), "Call `backward` inside"),
        (unsent, "into one function"),
    ):
        try:
            jitted(tokens.device, refused)(tokens)
        except CollectiveError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"ran: {words}")


# -- overrides -----------------------------------------------------------------------------------


def overridden(x: torch.Tensor, n: int) -> Tensors:
    """What overridden collectives give on device "jax": here in words, there by overrides. In a shard_map:
    overrides_on_eight_devices.py."""
    total, largest = all_reduce("sum", x, n)[0], all_reduce("max", x, n)[0]
    if x.device.type == "cpu":
        return [-x, *[3 * largest] * 4, *[-total] * 2, *[total] * 4, *ddp({"hook": bf16_compress_hook}, x, n)]
    import threading

    from torchax_core import Environment, default_env, override_op_definition

    env, functional, in_place = default_env(), "_c10d_functional::all_reduce", "c10d::allreduce_"

    def three_of_largest(input, reduce_op, group_name):
        return 3 * torch.ops._c10d_functional.all_reduce(input, "max", group_name)

    def negated(tensors, *rest):
        result = torch.ops.c10d.allreduce_(tensors, *rest)
        for tensor in tensors:
            tensor.neg_()
        return result

    def in_bfloat16(tensors, *rest):
        halves = [tensor.bfloat16() for tensor in tensors]
        result = torch.ops.c10d.allreduce_(halves, *rest)
        for tensor, half in zip(tensors, halves, strict=True):
            tensor.copy_(half)
        return result

    def failing(*args, **kwargs):
        raise ZeroDivisionError

    def sum_of(x: torch.Tensor) -> torch.Tensor:
        return functional_all_reduce("sum", x, n)[0]

    found = []
    with env.override_op_definition(functional, lambda input, *_: -input):
        with env.override_op_definition(functional, lambda input, reduce_op, group_name: -input, is_jax_function=True):
            found.append(sum_of(x))
            levels = [source.level for source in env.explain(functional).chain[:3]]
            assert levels == ["override", "override", "pack"], levels
    with env.override_op_definition(functional, three_of_largest):
        leaf = x.clone().requires_grad_()
        result = sum_of(leaf)
        result.backward(x)
        found += [result, leaf.grad]
    with override_op_definition(functional, three_of_largest):
        found.append(sum_of(x))

    def in_a_thread() -> None:
        environment = Environment()
        environment.override_op_definition(functional, three_of_largest)
        with environment:
            found.append(sum_of(x))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    first = env.override_op_definition(in_place, lambda *_: NotImplemented)
    second = env.override_op_definition(in_place, negated)
    found += all_reduce("sum", x, n)
    first.undo()
    found += all_reduce("sum", x, n)
    second.undo()
    found += [*all_reduce("sum", x, n), sum_of(x)]
    with env.override_op_definition(in_place, failing):
        try:
            dist.all_reduce(x.clone())
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("what an override raised did not arrive")
    with env.override_op_definition(in_place, lambda *_: NotImplemented):
        found += all_reduce("sum", x, n)
    found += all_reduce("sum", x, n)
    with env.override_op_definition(in_place, in_bfloat16):
        return found + ddp({}, x, n)


def training(full: bool) -> list[Case]:
    """All of them, or those that the tests run."""
    found, single = [], torch.float32
    kinds: dict[str, dict[str, object]] = {
        "": {"broadcast_buffers": True},
        ", bucket views, no_sync": {"gradient_as_bucket_view": True, "accumulate": True, "bucket_cap_mb": 0.0001},
        ", find_unused_parameters": {"find_unused_parameters": True, "branches": some_ranks},
        ", static_graph, bfloat16 hook": {
            "static_graph": True,
            "branches": lambda i: False,
            "hook": bf16_compress_hook,
        },
        ", hook": {"hook": allreduce_hook},
        ", bfloat16 hook": {"hook": bf16_compress_hook},
        ", find_unused_parameters, bucket views, no_sync": {
            "find_unused_parameters": True,
            "branches": some_ranks,
            "gradient_as_bucket_view": True,
            "accumulate": True,
        },
        ", static_graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    }
    for kind, options in kinds.items() if full else list(kinds.items())[:4]:
        rounded = HALF_SUMS if "bfloat16" in kind else ROUNDED
        found.append(Case(f"DDP{kind}", single, functools.partial(ddp, options), ranked=True, rounded=rounded))
    sharding: dict[str, dict[str, object]] = {
        "": {"delay": True},
        ", kept after forward, gradients clipped": {"reshard_after_forward": False, "clip": 0.5},
    }
    for kind, options in sharding.items() if full else list(sharding.items())[:1]:
        found.append(
            Case(f"fully_shard{kind}", single, functools.partial(sharded, options), ranked=True, rounded=ROUNDED)
        )
    found.append(Case("DTensor, parallelize_module", single, parallelized, ranked=True, rounded=ROUNDED))
    found.append(Case("torch.compile", single, compiled, ranked=True, rounded=ROUNDED))
    for kind, options in (("", {}), (", bucket views", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001})):
        if full or not kind:
            body = functools.partial(whole_step, options)
            found.append(Case(f"DDP, whole step{kind}", single, body, ranked=True, rounded=ROUNDED))
    found.append(Case("several groups in jit", single, in_jit, ranked=True, rounded=ROUNDED))
    found.append(Case("constants in jit", single, constants, ranked=True))
    found.append(Case("overrides", single, overridden, ranked=True, rounded=HALF_SUMS))
    found.append(Case("average_gradients", single, average_by_hand, ranked=True, rounded=ROUNDED))
    found.append(Case("SyncBatchNorm", single, sync_batch_norm, ranked=True, rounded=ROUNDED))
    return found

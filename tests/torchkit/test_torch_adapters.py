"""Every adapter of torchkit, exercised: written for torch 2.13, and working from 2.10 on.

When a test here fails after an upgrade of torch, the adapter that it names is the one to edit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader

import drumline.torchkit as torchkit
from drumline.torchkit import (
    autograd,
    compiler,
    data_workers,
    ddp,
    dispatch_modes,
    fake_tensors,
    fsdp,
    fused_adam,
    libraries,
    modules,
    operators,
    optimizers,
    process_groups,
    profiler,
    pytree,
    recurrent,
    schemas,
    storages,
)

WRITTEN_FOR = "2.13"
OLDEST = "2.10"
ADAPTERS = sorted(Path(str(torchkit.__file__)).parent.glob("[!_]*.py"))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def test_adapters_and_tests_are_for_one_torch_release() -> None:
    assert (torchkit.WRITTEN_FOR, torchkit.OLDEST) == (WRITTEN_FOR, OLDEST)
    assert _release(OLDEST) <= _release(torch.__version__)


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda p: p.stem)
def test_an_adapter_states_its_release_and_the_missing_api(path: Path) -> None:
    text = path.read_text()
    assert f"Written for torch {WRITTEN_FOR}." in text and "Missing public API:" in text


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda p: p.stem)
def test_every_adapter_has_a_test(path: Path) -> None:
    assert f"{path.stem}." in Path(__file__).read_text()


# -- fake tensors


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with fake_tensors.FakeTensorMode() as mode:
        x = torch.empty(3, 4)
        assert isinstance(x, fake_tensors.FakeTensor) and x.fake_mode is mode
        assert (x @ x.mT).shape == (3, 3)
        with pytest.raises(fake_tensors.VALUE_REQUESTS):
            x.sum().item()
        with pytest.raises(fake_tensors.VALUE_REQUESTS):
            x.nonzero()
        with fake_tensors.unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1.0, 1.0]


def test_active_fake_mode() -> None:
    assert fake_tensors.active_fake_mode() is None
    with fake_tensors.FakeTensorMode() as mode:
        assert fake_tensors.active_fake_mode() is mode
    assert fake_tensors.active_fake_mode() is None


def test_prepare_lets_transformers_accept_fake_masks() -> None:
    fake_tensors.prepare()
    fake_tensors.prepare()  # a second time changes nothing
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(encoder(x, mask=mask), encoder(x, mask=mask, is_causal=True))
    with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert encoder(torch.empty(2, 5, 8), mask=mode.from_tensor(mask)).shape == (2, 5, 8)


# -- modes


class _Names(dispatch_modes.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _UnwrappedNames(_Names, dispatch_modes.UnwrappedDispatchMode):
    pass


@pytest.mark.parametrize("kind", [_Names, _UnwrappedNames])
def test_dispatch_modes_see_every_operator(kind: type[_Names]) -> None:
    with kind() as mode:
        torch.ones(2) + 1
        with dispatch_modes.without_dispatch_modes():
            torch.ones(2) * 2
    assert "add" in mode.names and "mul" not in mode.names


class _Passing(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Passing.calls += 1
        return func(*args, **(kwargs or {}))


class _Tagged(torch.Tensor):
    """A subclass that survives every operator, unless function modes are left."""


def test_function_modes() -> None:
    assert dispatch_modes.function_modes() == []
    with _Passing() as outer, _Passing() as inner:
        assert dispatch_modes.function_modes() == [outer, inner]
    tagged = torch.ones(2).as_subclass(_Tagged)
    assert type(tagged + 1) is _Tagged
    with dispatch_modes.without_function_modes():
        assert type(tagged.as_subclass(torch.Tensor)) is torch.Tensor


def test_view_tracking_shares_the_version_counter() -> None:
    aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Detach(dispatch_modes.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            with dispatch_modes.with_view_tracking():
                tracked = out.detach()
            aliases.append((tracked, out.detach()))
            return out

    x = torch.ones(2)
    with Detach():
        y = x.mul(2)
    y.add_(1)
    tracked, untracked = aliases[0]
    assert (y._version, tracked._version, untracked._version) == (1, 1, 0)


# -- nests, graphs, modules


def test_pytree() -> None:
    nest = {"a": [1, 2], "b": (3,)}
    leaves, spec = pytree.tree_flatten(nest)
    assert leaves == pytree.tree_leaves(nest) == [1, 2, 3]
    assert pytree.tree_unflatten([n + 1 for n in leaves], spec) == pytree.tree_map(lambda n: n + 1, nest)


def test_mode_switches_are_the_calls_of_a_captured_graph() -> None:
    dispatch_modes.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        dispatch_modes.set_grad_enabled(True)
    switch = dispatch_modes.enter_autocast("cpu", torch.bfloat16, True, True)
    try:
        assert torch.is_autocast_enabled("cpu")
    finally:
        dispatch_modes.exit_autocast(switch)
    assert not torch.is_autocast_enabled("cpu")

    def frozen(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return x @ x

    traced = make_fx(frozen, pre_dispatch=True)(torch.ones(2, 2))
    targets = [node.target for node in traced.graph.nodes]
    switches = (dispatch_modes.set_grad_enabled, dispatch_modes.enter_autocast, dispatch_modes.exit_autocast)
    assert all(switch in targets for switch in switches)


def test_module_bases() -> None:
    assert isinstance(nn.BatchNorm2d(2), modules.BatchNormBase) and isinstance(
        nn.SyncBatchNorm(2), modules.BatchNormBase
    )
    assert not isinstance(nn.InstanceNorm2d(2), modules.BatchNormBase)
    assert isinstance(nn.InstanceNorm2d(2), modules.RunningNormBase)
    assert isinstance(nn.Dropout(), modules.DropoutBase) and isinstance(nn.AlphaDropout(), modules.DropoutBase)


def test_reparametrize_runs_a_module_with_other_parameters() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with modules.reparametrize(layer, {"weight": torch.zeros(2, 2), "bias": torch.ones(2)}):
        assert layer(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert layer.weight is before


def test_buffers_hooks_and_tensors_of_a_module() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert modules.is_persistent(norm, "running_mean") and not modules.is_persistent(norm, "scratch")
    with pytest.raises(ValueError, match="2D or 3D"):
        modules.check_input_dim(norm, torch.zeros(1))
    assert not modules.has_gradient_hooks(norm.weight)
    norm.weight.register_post_accumulate_grad_hook(lambda _: None)
    norm.bias.register_hook(lambda gradient: gradient)
    assert modules.has_gradient_hooks(norm.weight) and modules.has_gradient_hooks(norm.bias)
    calls: list[str] = []
    norm.register_forward_hook(lambda *_: calls.append("after"))
    norm.register_forward_pre_hook(lambda *_: calls.append("before"))
    modules.clear_forward_hooks(norm)
    modules.convert_tensors(norm, lambda t: t.double() if t.is_floating_point() else t)
    assert norm(torch.ones(3, 2, dtype=torch.float64)).dtype == torch.float64 and calls == []
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.dtype == torch.int64


# -- operators


def test_schemas_of_operators() -> None:
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert schemas.argument_names(add) == ["self", "other", "alpha"] and schemas.overload_name(add) == "Tensor"
    assert schemas.writes_in_place(add_) and not schemas.writes_in_place(add)
    assert [a.is_write for a in schemas.schema_of(add_).arguments] == [True, False, False]
    assert schemas.schema_of(add).name == "aten::add" and schemas.schema_or_none(len) is None
    assert schemas.schema_or_none(add) is schemas.schema_of(add)


def test_storages_are_identified_by_their_memory() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert storages.storage_id(x) == storages.storage_id(x[1:]) == storages.storage_id(x.untyped_storage())
    assert storages.storage_id(x) != storages.storage_id(y)
    with fake_tensors.FakeTensorMode():
        z = torch.empty(4)
        assert storages.storage_id(z) == storages.storage_id(z.view(2, 2)) != storages.storage_id(torch.empty(4))


def test_operators_are_registered_for_a_while() -> None:
    x = torch.ones(2)
    with libraries.scoped_library("aten", "IMPL", "AutocastCPU") as library, torch.autocast("cpu", torch.bfloat16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once about a kernel that is replaced
            library.impl("cross_entropy_loss", lambda *_: x, allow_override=True)
        assert nn.functional.cross_entropy(x, x) is x
    assert nn.functional.cross_entropy(x, x) is not x


def test_scripted_functions_know_their_python() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and models still contain it
        scripted = torch.jit.script(double)
    assert libraries.python_of_script(scripted) is double and libraries.python_of_script(len) is None


def test_marks_of_optimizers_and_schedulers() -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        weight = nn.Parameter(torch.ones(2))
        optimizer, fused = kind([weight], lr=0.1), kind([weight], lr=0.1, fused=True)
        assert not optimizers.can_skip_on_device(optimizer) and optimizers.can_skip_on_device(fused)
        optimizers.mark_fused(optimizer)
        fresh = [n for n in vars(fused) if n not in vars(kind([weight], lr=0.1))]
        assert optimizers.can_skip_on_device(optimizer) and all(n in vars(optimizer) for n in fresh)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizers.mark_stepped(optimizer)
    scheduler.step()  # no warning


def test_foreach_and_fused_kernels() -> None:
    p = [torch.full((2,), 3.0), torch.full((3,), 4.0)]
    assert [float(n) for n in operators.foreach_norm(p)] == [pytest.approx(18**0.5), pytest.approx(48**0.5)]
    operators.foreach_mul_(p, 2.0)
    copies = [torch.empty(2), torch.empty(3)]
    operators.foreach_copy_(copies, p)
    assert [c.tolist() for c in copies] == [[6.0] * 2, [8.0] * 3]
    w, reference = torch.full((4,), 2.0), nn.Parameter(torch.full((4,), 2.0))
    reference.grad = torch.ones(4)
    torch.optim.AdamW([reference], lr=0.1, fused=False).step()
    state = [torch.zeros(4), torch.zeros(4)]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    step = [torch.tensor(1.0)]
    operators.fused_adamw_(
        [w], [torch.ones(4)], [state[0]], [state[1]], [], step, amsgrad=False, maximize=False, **numbers
    )
    torch.testing.assert_close(w, reference.detach())


def test_softmax_operators_have_their_backward() -> None:
    x, g = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    pairs = (
        (operators.softmax, operators.softmax_backward, torch.softmax),
        (operators.log_softmax, operators.log_softmax_backward, torch.log_softmax),
    )
    for forward, backward, public in pairs:
        leaf = x.clone().requires_grad_()
        public(leaf, -1).backward(g)
        out = forward(x, -1, False)
        torch.testing.assert_close(out, public(x, -1))
        torch.testing.assert_close(backward(g, out, -1, torch.float64), leaf.grad)


def test_flash_attention_of_the_cpu_and_its_backward() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        out, lse = operators.flash_attention_cpu(q, k, v, 0.0, True, scale=0.5)
        grads = operators.flash_attention_cpu_backward(gradient, q, k, v, out, lse, 0.0, True, scale=0.5)
    torch.testing.assert_close(out, expected.detach())
    for ours, leaf in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(ours, leaf.grad)


def test_operators_of_captured_graphs() -> None:
    assert operators.to_copy(torch.ones(2), dtype=torch.float64).dtype == torch.float64
    assert operators.unsafe_view(torch.ones(4), [2, 2]).shape == (2, 2)
    for n, resize in operators.upsample_nearest_exact.items():
        assert resize(torch.ones(1, 1, *[2] * n), [4] * n).shape == (1, 1, *[4] * n)


def test_assert_async() -> None:
    operators.assert_async(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="too large"):
        operators.assert_async(torch.tensor(False), "too large")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a kernel of CUDA")
def test_spin_keeps_a_gpu_busy() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    operators.spin(10_000_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 1.0


# -- autograd, profiler, compiler


def test_nodes_are_numbered_in_the_order_of_the_forward() -> None:
    seen: list[int | None] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(autograd.running_node_number())
            return gradient

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(autograd.running_node_number()))
    first = autograd.next_node_number()
    y = Note.apply(x)
    second = autograd.next_node_number()
    Note.apply(y).sum().backward()
    assert first < second and seen == [second, first, -1]
    assert autograd.running_node_number() is None


def test_profiler_state_and_spans() -> None:
    assert not profiler.profiler_enabled() and not profiler.spans_are_recorded()
    with profile(acc_events=True) as trace:
        assert profiler.profiler_enabled() and profiler.spans_are_recorded()
        span = record_function("a span of ours")
        span.__enter__()
        done: torch.futures.Future[None] = torch.futures.Future()
        profiler.end_with_future(span, done)
        done.set_result(None)
    assert "a span of ours" in {event.name for event in trace.events()}

    with _Names() as mode, record_function("another"):
        pass
    names = {op.overloadpacket.__name__ for op in profiler.SPAN_OPERATORS}
    assert mode.names and set(mode.names) <= names


def test_recompile_limits_are_raised() -> None:
    config = compiler.load_compiler().config
    before = config.recompile_limit, config.accumulated_recompile_limit
    compiler.allow_recompiles(3)
    try:
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (before[0] + 3, before[1] + 3)
    finally:
        compiler.allow_recompiles(-3)


# -- recurrent layers, workers, groups


def test_recurrent_switch_and_warning() -> None:
    before = recurrent.onednn_enabled()
    recurrent.set_onednn_enabled(False)
    try:
        assert not recurrent.onednn_enabled()
    finally:
        recurrent.set_onednn_enabled(before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recurrent.silence_rnn_contiguity_warning()
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory. And so on.", stacklevel=1)
    assert caught == []


def test_weight_names_of_recurrent_layers() -> None:
    layer = nn.LSTM(2, 3, num_layers=2)
    assert recurrent.weight_names(layer) == [name for name, _ in layer.named_parameters()]


def test_workers_start_without_a_handler_and_end_at_once() -> None:
    with data_workers.without_sigchld_handler():
        batches: Iterator[Any] = iter(DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    assert next(batches).tolist() == [0]
    workers = batches._workers  # type: ignore[attr-defined]
    data_workers.end_workers(batches)
    assert not any(w.is_alive() for w in workers)


def test_process_groups_give_their_stores(tmp_path: Path) -> None:
    assert not process_groups.has_backend("nobody registered this")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        process_groups.default_store().set("key", "value")
        assert process_groups.default_store().get("key") == b"value"
        process_groups.store_of(None).set("own", "1")
        assert process_groups.store_of(dist.new_group([0])) is not None
        _check_sharded_and_replicated()
    finally:
        dist.destroy_process_group()
    assert process_groups.AllgatherOptions() is not None


def _check_sharded_and_replicated() -> None:
    """Parameters and buckets as torch's own data parallelism reports them, in a world of one rank."""
    layer = nn.Linear(2, 2)
    assert fsdp.parameter_group(layer) is None
    sharded = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    group = fsdp.parameter_group(sharded)
    assert [fsdp.place_of(p).param_name for p in group.fsdp_params] == ["weight", "bias"]
    assert all(fsdp.place_of(p).module is sharded for p in group.fsdp_params)
    seen: list[list[bool]] = []
    then = group.post_backward

    def post_backward(*args: Any) -> Any:
        seen.append([fsdp.has_full_gradient(p) for p in group.fsdp_params])
        return then(*args)

    group.post_backward = post_backward
    (sharded(torch.ones(1, 2)).sum() * 1.0).backward()
    assert seen == [[True, True]]
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(3, 5))
    for _ in range(2):
        replicated(torch.ones(1, 3)).sum().backward()
    assert sum(ddp.bucket_bytes(replicated)) == 4 * (3 * 5 + 5)


# -- the fused step; test_fused_adam.py has more


def test_fused_step_with_prepared_lists() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(2)
    fused = fused_adam.FusedAdam(optimizer)
    assert not fused.step(None, torch.zeros(()))  # there are no states yet
    optimizer.step()
    before = weight.detach().clone()
    assert fused.step(None, torch.zeros(()))
    assert (weight < before).all() and float(optimizer.state[weight]["step"]) == 2.0
    assert not operators.has_global_step_hooks()

"""One contract for every private upstream name that _compat uses: it is there, and does what we
need of it."""

import ast
import contextlib
import inspect
import logging
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.types import ShardedModule

import lightning_distrec._compat as _deprecations
from lightning_distrec._compat import fbgemm as _fbgemm
from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import tensors as _tensors
from lightning_distrec._compat import torch as _torch
from lightning_distrec._compat import torchrec_modules as _torchrec
from lightning_distrec.host_memory import release_pages
from tests.support.click_model import ClickModel, bag_configs, seeded, train_sharded
from tests.support.ranks import join_group, run_each_on_ranks
from tests.support.trainers import one_process_trainer

TESTS = Path(__file__).parents[1]
COMPAT = TESTS.parent / "lightning_distrec" / "_compat"
ELSEWHERE = {
    "num_batches_stepped": "unit/checkpoint/test_logged_steps.py",
    "update_plateaus_of_this_epoch": "unit/checkpoint/test_plateaus.py",
}
"""Function -> the quick test of the product that fails where upstream does something else."""


def test_every_function_of_compat_has_a_contract_here() -> None:
    names = [
        node.name
        for file in COMPAT.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    local = "".join(
        file.read_text() for file in sorted(Path(__file__).parent.glob("test_compat*.py"))
    )
    used = {node.attr for node in ast.walk(ast.parse(local)) if isinstance(node, ast.Attribute)}
    used |= set(re.findall(r"use of (\w+)", local)) | ELSEWHERE.keys()
    assert set(names) <= used, set(names) - used
    assert all((TESTS / file).exists() for file in ELSEWHERE.values())


def test_sizes_from_zero_gives_programs_no_lower_limit() -> None:
    sizes = ({0: torch.export.Dim.AUTO},)
    lower = []
    for context in (contextlib.nullcontext(), _torch.sizes_from_zero()):
        with context:
            program = torch.export.export(
                nn.Linear(2, 1), (torch.ones(3, 2),), dynamic_shapes=sizes
            )
        lower += [limits.lower for limits in program.range_constraints.values()]
    assert lower == [2, 0]


def test_init_optimizers_and_schedulers_returns_plain_optimizers_in_order() -> None:
    model = BoringModel()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]
    model.configure_optimizers = lambda: (optimizers, schedulers)
    model.automatic_optimization = False
    model._trainer = one_process_trainer()
    actual, configs = _lightning.init_optimizers_and_schedulers(model)
    assert actual == optimizers
    assert [config.scheduler for config in configs] == schedulers


def test_move_optimizers_to_device_moves_their_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    _lightning.move_optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[weight]["momentum_buffer"].is_meta


def _ignored_by_ddp() -> list[list[float]]:
    """Return weights that were broadcast, those that DDP has, and the gradient of the second."""
    rank, _ = join_group()
    modules = [nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2))) for _ in range(2)]
    for parameter in (*modules[0].parameters(), *modules[1].parameters()):
        nn.init.constant_(parameter, 1.0 + rank)
    _torch.broadcast_module_states(modules[0], ["1.weight"])
    _torch.ignore_in_ddp(modules[1], ["1.weight"])
    wrapped = DistributedDataParallel(modules[1])
    wrapped(torch.full((1, 1), 1.0 + rank)).sum().backward()
    weights = [[weight.item() for weight in module.parameters()] for module in modules]
    return [*weights, [modules[1][1].weight.grad.item()]]


def test_average_models_are_where_the_callbacks_keep_them() -> None:
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)):
        assert f"self.{_lightning.AVERAGE} = " in inspect.getsource(type(callback).setup)
        assert getattr(callback, _lightning.AVERAGE) is None


def test_pruned_holds_the_modules_and_names_of_model_pruning() -> None:
    model, callback = BoringModel(), ModelPruning("l1_unstructured", amount=0.5)
    callback.setup(one_process_trainer(), model, "fit")
    assert set(getattr(callback, _lightning.PRUNED)) == {
        (model.layer, "weight"),
        (model.layer, "bias"),
    }


def test_unscales_in_step_knows_torchs_fused_optimizers() -> None:
    weight = nn.Parameter(torch.zeros(1))
    assert not _lightning.unscales_in_step(torch.optim.Adam([weight]))
    assert _lightning.unscales_in_step(torch.optim.Adam([weight], fused=True))


def test_share_hooks_runs_and_removes_them_on_both() -> None:
    called: list[str] = []
    original, module = nn.Linear(1, 1), nn.Linear(1, 1)
    initial = original.register_forward_pre_hook(lambda *_: called.append("before"))
    _torch.share_hooks(original, module)
    original.register_forward_hook(lambda *_: called.append("after"))
    original.register_full_backward_hook(lambda *_: called.append("backward"))
    _torch.share_hooks(original, module)
    module(torch.ones(1, 1, requires_grad=True)).sum().backward()
    initial.remove()
    module(torch.ones(1, 1))
    assert called == ["before", "after", "backward", "after"]


def test_hooks_on_gradients_are_seen_of_both_kinds_or_of_one() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    weights[1].register_hook(lambda gradient: None)
    weights[2].register_post_accumulate_grad_hook(lambda weight: None)
    assert [_torch.have_gradient_hooks([weight]) for weight in weights] == [False, True, True]
    assert not _torch.have_gradient_hooks([weights[0], weights[2]], but=1)
    assert _torch.have_gradient_hooks(weights, but=1)
    assert [_torch.has_tensor_hooks(weight) for weight in weights] == [False, True, False]


def test_take_gradient_hooks_takes_both_kinds_and_puts_them_back() -> None:
    weight, seen = nn.Parameter(torch.ones(1)), []
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0})
    handle = weight.register_post_accumulate_grad_hook(seen.append)
    assert len(_torch.in_backward_optimizers(weight)) == 1
    hooks, put_back = _torch.take_gradient_hooks(weight)
    weight.sum().backward()
    assert (weight.item(), list(hooks.values()), seen) == (1.0, [seen.append], [])
    weight.grad = None
    put_back()
    weight.sum().backward()
    assert (weight.item(), len(seen), weight.grad) == (0.0, 1, None)
    _torch.take_gradient_hooks(weight)[1]()
    hooks, _ = _torch.take_gradient_hooks(weight)
    handle.remove()
    assert not hooks


def test_move_in_backward_moves_optimizers_to_another_parameter() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0})
    expected = _get_in_backward_optimizers(nn.ParameterList([weight]))
    _torch.move_in_backward(weight, other)
    assert _get_in_backward_optimizers(nn.ParameterList([weight, other])) == expected != []


def test_leave_optimizers_in_backward_skips_nothing_else() -> None:
    source = inspect.getsource(DistributedDataParallel._lazy_init).split(":", 1)[1].splitlines()
    lines = [line.strip() for line in source if line.strip() and "#" not in line]
    assert lines == ["self._setup_in_backward_optimizers()", "self._lazy_init_ran = True"]
    ddp = SimpleNamespace(_lazy_init_ran=False)
    _torch.leave_optimizers_in_backward(ddp)
    assert ddp._lazy_init_ran


def test_watch_total_norm_sees_what_clip_grad_norm_takes_and_can_be_undone() -> None:
    weight, seen = nn.Parameter(torch.zeros(2)), []
    weight.grad = torch.full((2,), 3.0)
    patches = _torch.watch_total_norm(seen.extend)
    assert clip_grad_norm_([weight], 1.0) == pytest.approx(3.0 * 2**0.5)
    assert seen[0] is weight.grad
    patches.close()
    clip_grad_norm_([weight], 1.0)
    assert len(seen) == 1


def test_attach_and_detach_fused_optimizer_set_what_torchrec_reads() -> None:
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    source = inspect.getsource(ShardedEmbeddingBagCollection.create_grouped_sharding_infos)
    collection = EmbeddingBagCollection(tables=bag_configs())
    parameter = next(collection.parameters())
    _torchrec.attach_fused_optimizer(parameter, {"learning_rate": 0.5}, "0.1")
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        assert hasattr(parameter, name)
        assert name in source
    _torchrec.detach_fused_optimizer(parameter)
    assert not hasattr(parameter, "_optimizer_kwargs")


def test_freed_weights_leave_a_collection_on_meta_that_fill_weight_gives_weights_again() -> None:
    collection = EmbeddingBagCollection(tables=bag_configs())
    shapes = {name: p.shape for name, p in collection.named_parameters()}
    _torchrec.free_weights(collection)
    assert {name: p.shape for name, p in collection.named_parameters()} == shapes
    assert all(p.is_meta for p in collection.parameters())
    assert collection.device.type == "meta"
    for name, shape in shapes.items():
        weight = torch.rand(shape)
        _torchrec.fill_weight(collection, name, weight, learns=False)
        assert collection.get_parameter(name).data_ptr() == weight.data_ptr()
    assert not any(p.requires_grad or p.is_meta for p in collection.parameters())
    assert collection.device == torch.device("cpu")


def _kernels_of_a_sharded_collection() -> dict[str, Any]:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    model = seeded(ClickModel, RowWiseAdagrad, {"lr": 0.1})
    actual: dict[str, Any] = {}

    def look() -> None:
        ddps = list(_torchrec.ddp_of_data_parallel_tables(_sharded(model)))
        assert all(isinstance(ddp, DistributedDataParallel) for ddp in ddps)
        actual["replicated"] = sum(p.numel() for ddp in ddps for p in ddp.parameters())
        sharded = _sharded(model)
        assert isinstance(sharded, ShardedModule)
        kernels = _fbgemm.fbgemm_kernels(sharded)
        actual["rounds at random"] = [kernel.stochastic_rounding for kernel in kernels]
        actual["divides"] = sharded._has_mean_pooling_callback
        initial = int(kernels[0].iter), int(kernels[0].iter_cpu)
        with _fbgemm.preserve_fbgemm_iterations(kernels):
            kernels[0].iter.add_(5)
            kernels[0].iter_cpu.add_(5)
        actual["kept"] = (int(kernels[0].iter), int(kernels[0].iter_cpu)) == initial
        sharded._has_mean_pooling_callback = True
        _torchrec.disable_mean_pooling_divisor(sharded)
        actual["left to us"] = sharded._has_mean_pooling_callback is False
        actual["inverse"] = _torchrec.prepare_unequal_batches(sharded)

    model.on_train_start = look  # type: ignore[method-assign]
    replicated = {"narrow": {"sharding_types": ["data_parallel"]}}
    train_sharded(model, 2, {"sharding_types": ["row_wise"], "tables": replicated})
    return actual


def _sharded(model: Any) -> Any:
    return model.trainer.strategy.run_tables.shards.sharded["ebc"]


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    """By rank."""
    calls = (_kernels_of_a_sharded_collection, _ignored_by_ddp)
    return run_each_on_ranks({call.__name__: (call,) for call in calls}, 2)


def test_ignore_in_ddp_and_broadcast_module_states_skip_the_named_tensors(
    on_ranks: list[dict[str, Any]],
) -> None:
    first, second = (results["_ignored_by_ddp"] for results in on_ranks)
    # The gradient is this rank's input, not the average of 1 and 2.
    assert first == [[1.0, 1.0], [1.0, 1.0], [1.0]]
    assert second == [[1.0, 2.0], [1.0, 2.0], [2.0]]


def test_fbgemm_kernels_their_counters_the_mean_and_ddp_are_where_we_look(
    on_ranks: list[dict[str, Any]],
) -> None:
    (size,) = (c.num_embeddings * c.embedding_dim for c in bag_configs() if c.name == "narrow")
    for results in on_ranks:
        result = results["_kernels_of_a_sharded_collection"]
        assert sorted(result.pop("inverse")) == ["a", "b", "b", "c", "d"]
        assert result == {
            "replicated": size,
            "rounds at random": [False],
            "divides": False,
            "kept": True,
            "left to us": True,
        }


def test_hide_upstream_deprecations_hides_those_and_no_others() -> None:
    texts = {
        "Please use DTensor instead and we are deprecating ShardedTensor.": DeprecationWarning,
        "`torch.distributed.reduce_scatter_tensor` is deprecated. Use x.": FutureWarning,
        "`isinstance(treespec, LeafSpec)` is deprecated, use y": FutureWarning,
        "Sparse invariant checks are implicitly disabled. Memory": UserWarning,
        "your learning rate is negative": UserWarning,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _deprecations.hide_upstream_deprecations()
        for text, kind in texts.items():
            warnings.warn(text, kind, stacklevel=1)
    assert [str(w.message) for w in caught] == ["your learning rate is negative"]


def test_silence_torchrec_is_needed_and_restores_the_levels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torchrec.distributed.planner import Topology

    with _torchrec.silence_torchrec():
        Topology(world_size=2, compute_device="cpu")
    assert "the job will fail" not in caplog.text
    assert logging.getLogger("torchrec").level == logging.NOTSET


def _sharders_that_draw(undrawn: bool) -> list[bool]:
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
        )
    environment, draw = ShardingEnv.from_process_group(torch.distributed.group.WORLD), []
    options: Any = {"name": "t", "embedding_dim": 4, "num_embeddings": 8, "feature_names": ["a"]}
    pairs: Any = [
        (EmbeddingBagCollection([EmbeddingBagConfig(**options)]), EmbeddingBagCollectionSharder()),
        (EmbeddingCollection([EmbeddingConfig(**options)]), EmbeddingCollectionSharder()),
    ]
    for collection, sharder in pairs:
        plan = construct_module_sharding_plan(
            collection, {"t": row_wise()}, sharder, local_size=1, world_size=1, device_type="cpu"
        )
        random_state = torch.get_rng_state()
        with _torchrec.keep_rows_undrawn(release_pages) if undrawn else contextlib.nullcontext():
            sharder.shard(collection, plan, environment, torch.device("cpu"))
        draw.append(not torch.equal(torch.get_rng_state(), random_state))
    torch.distributed.destroy_process_group()
    return draw


def test_keep_rows_undrawn_is_needed_and_keeps_both_collections_from_drawing() -> None:
    assert _sharders_that_draw(undrawn=False) == [True, True]
    assert _sharders_that_draw(undrawn=True) == [False, False]


def test_a_collection_resets_its_parameters_where_note_device_says_that_they_are() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["a"])
    bags = EmbeddingBagCollection([config], device=torch.device("meta"))
    bags.embedding_bags["t"].weight = nn.Parameter(torch.full((8, 4), 7.0))
    bags.reset_parameters()
    assert bool((bags.embedding_bags["t"].weight == 7).all()), "it is needed"
    _torchrec.note_device(bags)
    bags.reset_parameters()
    assert not bool((bags.embedding_bags["t"].weight == 7).any())


def test_keep_rows_undrawn_makes_zeros_that_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    torch.full((2**24,), 7.0)  # what is freed here may be taken again
    with _torchrec.keep_rows_undrawn(release_pages):
        before = resident_bytes()
        zeros = [
            torch.zeros(2**24 + 5, device=torch.device("cpu")),
            torch.zeros(2**24, device="cpu", dtype=torch.half),
        ]
        assert resident_bytes() - before < 2**20
    assert not any(bool(tensor.any()) for tensor in zeros)


def test_batches_that_stepped_and_the_progress_bar_are_what_lightning_uses() -> None:
    steps, shown = [], []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, _: Any, batch: Any, index: int) -> None:
            _lightning.show_in_progress_bar(trainer, "speed", f"{index}x")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(_lightning.batches_that_stepped(trainer))
            shown.append(trainer.progress_bar_metrics["speed"])

    limits = {"limit_train_batches": 4, "limit_val_batches": 0}
    trainer = one_process_trainer(accumulate_grad_batches=2, callbacks=[Looks()], **limits)
    trainer.fit(BoringModel())
    assert steps == [0, 0, 1, 1]
    assert shown == ["0x", "1x", "2x", "3x"]


def test_in_backward_is_true_in_backward_only() -> None:
    seen: list[bool] = []
    weight = nn.Parameter(torch.zeros(2))
    weight.register_hook(lambda gradient: seen.append(_torch.in_backward()))
    loss = weight.sum()
    assert not _torch.in_backward()
    loss.backward()
    assert seen == [True]
    assert not _torch.in_backward()


def test_watch_collectives_sees_calls_by_torchrec_and_can_be_undone() -> None:
    from torchrec.distributed import comm_ops, dist_data

    original = torch.distributed.all_to_all_single
    seen: list[Any] = []
    patches = _torch.watch_collectives(
        ("all_to_all_single", "no_such_function"), lambda *reported: seen.append(reported)
    )
    for module in (comm_ops, dist_data):
        assert module.dist.all_to_all_single is not original
        assert "dist.all_to_all_single(" in inspect.getsource(module)
    with pytest.raises(TypeError, match="output"):  # the watched function itself says what is wrong
        torch.distributed.all_to_all_single(1, 2, input_split_sizes=[3])
    patches.close()
    assert torch.distributed.all_to_all_single is original
    assert seen == [
        ("all_to_all_single", {"output": 1, "input": 2, "input_split_sizes": [3]}, __name__)
    ]
    assert not hasattr(torch.distributed, "no_such_function")


def test_rows_of_a_sparse_gradient_are_there_as_often_as_they_were_looked_up() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([3, 1, 3])).sum().backward()
    assert table.weight.grad is not None
    rows, values = _tensors.rows_and_values(table.weight.grad)
    assert rows.tolist() == [3, 1, 3]
    assert values.tolist() == [[1.0, 1.0]] * 3


def test_mark_coalesced_keeps_what_accumulation_forgets_for_gradients_of_as_many_rows() -> None:
    weight = nn.Parameter(torch.zeros(5, 2))
    summed = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2), check_invariants=False
    )

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return summed.coalesce() * 1

    Lookup.apply(weight).backward()
    assert weight.grad is not None
    assert not weight.grad.is_coalesced(), "torch keeps the mark now, and we need not"
    _tensors.mark_coalesced(weight.grad, 3)
    assert not weight.grad.is_coalesced()
    _tensors.mark_coalesced(weight.grad, 2)
    assert weight.grad.indices().tolist() == [[1, 3]]
    _tensors.mark_coalesced(torch.zeros(2), 2)


def test_call_after_closure_calls_between_closure_and_update_and_can_be_undone() -> None:
    calls: list[str] = []

    class Model(BoringModel):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            calls.append("hook")

        def on_train_batch_end(self, *_: Any) -> None:
            calls.append("end")

    model, trainer = Model(), one_process_trainer(max_steps=1, limit_val_batches=0)
    plugin, bias = trainer.precision_plugin, model.layer.bias.tolist()
    patches = _lightning.call_after_closure(
        plugin, lambda: calls.append(f"not updated: {model.layer.bias.tolist() == bias}")
    )
    trainer.fit(model)
    assert calls == ["hook", "not updated: True", "end"]
    assert model.layer.bias.tolist() != bias
    patches.close()
    assert plugin._after_closure.__func__ is type(plugin)._after_closure


def test_foreach_is_used_for_a_class_of_parameters() -> None:
    class Kind(nn.Parameter):
        pass

    _torch.use_foreach_for(Kind)
    _torch.use_foreach_for(Kind)
    from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types

    assert _foreach_supported_types.count(Kind) == 1
    assert "_foreach_supported_types" in inspect.getsource(_default_to_fused_or_foreach)
    _foreach_supported_types.remove(Kind)


def test_norms_and_products_of_many_tensors_are_those_of_each() -> None:
    tensors = [torch.randn(3, 2), torch.randn(4)]
    expected = [tensor * 0.5 for tensor in tensors]
    for norm, tensor in zip(_torch.norms_of(tensors), tensors, strict=True):
        assert torch.equal(norm, torch.linalg.vector_norm(tensor))
    _torch.scale_all(tensors, torch.tensor(0.5))
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def test_a_first_step_post_hook_is_called_before_those_that_are_there() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.register_step_post_hook(lambda *_: calls.append("user's"))
    handle = _torch.register_first_step_post_hook(optimizer, lambda *_: calls.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == ["first", "user's", "user's"]


def test_without_torch_function_subclasses_are_plain_tensors() -> None:
    seen: list[Any] = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Seen)
    with _torch.without_torch_function():
        assert type(tensor + 1) is torch.Tensor
    assert seen == []


def test_current_backward_has_a_number_of_its_own_for_each_backward() -> None:
    seen: list[int] = []
    leaf = torch.ones(2, requires_grad=True)
    first, second = leaf * 2, leaf * 3
    for output in (first, second):
        output.register_hook(lambda _: seen.append(_torch.current_backward()))
    assert _torch.current_backward() == -1
    (first + second).sum().backward()
    (leaf * first.detach()).sum().backward()
    repeated = leaf * 2
    repeated.register_hook(lambda _: seen.append(_torch.current_backward()))
    repeated.sum().backward()
    assert seen[0] == seen[1] != seen[2]
    assert -1 not in seen


def test_abort_process_groups_is_there() -> None:
    assert list(inspect.signature(distributed_c10d._abort_process_group).parameters) == ["group"]
    # it is called, and there is none here
    with pytest.raises(AssertionError, match="cannot be None"):
        _torch.abort_process_groups()

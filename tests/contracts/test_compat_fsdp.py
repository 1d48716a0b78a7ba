"""What fully sharded modules, their copies and their checkpoints use of torch's private names."""

import copy
import inspect
import io
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import tensors as _tensors
from lightning_distrec._compat import torch as _torch
from lightning_distrec._compat import torch_distributed as _fully_shard
from tests.support.ranks import rank_and_num_ranks, run_on_ranks


class Net(nn.Module):
    """Two layers, the first of which is cut by itself; and a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(5, 4), nn.Linear(4, 3)
        self.seen = 0
        self.register_forward_pre_hook(_count)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(inputs))


def _count(module: Any, _: Any) -> None:
    module.seen += 1


def _on_a_rank() -> dict[str, Any]:
    rank, num_ranks = rank_and_num_ranks()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(5 * 4.0).view(5, 4)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    single = [torch.distributed.new_group([rank]) for rank in range(num_ranks)]
    local = [LocalShard(torch.zeros(2), ShardMetadata([0], [2], f"rank:{rank}/cpu"))]
    net = Net()
    kept = SimpleNamespace()
    fully_shard(net.low, mesh=mesh)
    _fully_shard.assign_to(net.low, {id(net.low.weight): [kept]})
    fully_shard(net, mesh=mesh)
    net(torch.ones(2, 5))
    net.reshard()
    state = _fully_shard.without_fully_shard(dict(vars(net)))
    plain = _fully_shard.class_before_fully_shard(net)
    single_values: nn.Module = plain.__new__(plain)
    single_values.__setstate__(
        {key: value for key, value in state.items() if key != "_modules"} | {"_modules": {}}
    )
    hooks = list(single_values._forward_pre_hooks.values())
    high = copy.deepcopy(net.high)
    num_before = len(high._state_dict_pre_hooks), len(high._load_state_dict_pre_hooks)
    _fully_shard.drop_state_dict_hooks(high)
    _torch.apply_to_tensors(net, lambda tensor: tensor * 0)
    net(torch.ones(2, 5)).sum().backward()
    reduces = [_fully_shard.reduces_gradients(net.low)]
    net.set_requires_gradient_sync(False)
    reduces.append(_fully_shard.reduces_gradients(net.low))
    net(torch.ones(2, 5)).sum().backward()
    (sharded, gathered), *_ = _fully_shard.sharded_and_unsharded_parameters(net.low)
    unsent = _fully_shard.unsharded_parameter(gathered).grad
    _fully_shard.drop_unreduced_gradient(gathered)
    writes = _fully_shard.unsharded_parameter(gathered)._version
    weight = _fully_shard.unsharded_parameter(gathered)
    net(torch.ones(2, 5))
    gathering = _fully_shard.unsharded_parameter(gathered)._version - writes
    net.low.unshard()
    follows = [kept.parameter is net.low.weight, isinstance(kept.parameter, DTensor)]
    with torch.no_grad():
        _fully_shard.unsharded_parameter(gathered).add_(1)
    _fully_shard.reset_after_failure(net)
    return {
        "gathered": (
            sharded is net.low.weight,
            tuple(_fully_shard.unsharded_parameter(gathered).shape),
        ),
        "follows": [
            *follows,
            kept.parameter is net.low.weight,
            isinstance(kept.parameter, DTensor),
        ],
        "stays": _fully_shard.unsharded_parameter(gathered) is weight,
        "reduces": reduces,
        "unsent": (unsent is not None, _fully_shard.unsharded_parameter(gathered).grad is None),
        "writes": (gathering, _fully_shard.unsharded_parameter(gathered)._version - writes),
        "offsets": _tensors.local_offsets(cut),
        "first replica": _tensors.is_first_replica(
            init_from_local_shards(local, [2], process_group=single[rank])
        ),
        "local": cut.to_local(),
        "class": plain.__name__,
        "is cut": isinstance(net, FSDPModule) and not isinstance(single_values, FSDPModule),
        "hooks left": [hook.__name__ for hook in hooks]
        + list(single_values._forward_hooks.values()),
        "pickles": torch.save(dict(state, _modules={}, _parameters={}), io.BytesIO()) is None,
        "state dict hooks": (
            num_before,
            len(high._state_dict_pre_hooks),
            len(high._load_state_dict_pre_hooks),
        ),
        "still sharded": all(isinstance(parameter, DTensor) for parameter in net.parameters()),
        "emptied": float(net.low.weight.full_tensor().abs().sum()),
    }


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    return run_on_ranks(_on_a_rank, 2)


def test_local_offsets_are_where_the_local_tensor_begins(actual: list[dict[str, Any]]) -> None:
    whole = torch.arange(5 * 4.0).view(5, 4)
    for rank_result in actual:
        (row, column), local = rank_result["offsets"], rank_result["local"]
        assert torch.equal(
            whole[row : row + local.shape[0], column : column + local.shape[1]], local
        )


def test_is_first_replica_is_true_in_the_group_of_rank_0(actual: list[dict[str, Any]]) -> None:
    assert [rank_result["first replica"] for rank_result in actual] == [True, False]


def test_assign_to_gives_places_the_gathered_parameter_and_the_shard(
    actual: list[dict[str, Any]],
) -> None:
    for rank_result in actual:
        assert rank_result["follows"] == [True, False, True, True]


def test_class_before_fully_shard_and_without_fully_shard_leave_what_the_user_made(
    actual: list[dict[str, Any]],
) -> None:
    for rank_result in actual:
        assert rank_result["class"] == "Net"
        assert rank_result["is cut"]
        assert rank_result["hooks left"] == ["_count"]
        assert rank_result["pickles"], "nothing of fully_shard's is left in it"


def test_drop_state_dict_hooks_removes_those_of_fully_shard(actual: list[dict[str, Any]]) -> None:
    for rank_result in actual:
        assert rank_result["state dict hooks"] == ((1, 1), 0, 0)


def test_apply_to_tensors_keeps_a_sharded_module_in_step(actual: list[dict[str, Any]]) -> None:
    for rank_result in actual:
        assert rank_result["still sharded"]
        assert rank_result["emptied"] == 0.0


def test_is_view_tells_views() -> None:
    memory = torch.ones(2, 2, requires_grad=True) * 2
    assert _torch.is_view(memory.view(4))
    assert not _torch.is_view(memory)


def test_set_device_and_mesh_sets_what_a_lightning_module_returns() -> None:
    module = LightningModule()
    _lightning.set_device_and_mesh(module, torch.device("meta"), "a mesh")
    assert module.device.type == "meta"
    assert module.device_mesh == "a mesh"


def test_unsharded_parameters_are_the_weights_in_both_forms(actual: list[dict[str, Any]]) -> None:
    for rank_result in actual:
        assert rank_result["gathered"] == (True, (4, 5))


def test_unsharded_parameters_are_made_once(actual: list[dict[str, Any]]) -> None:
    """Use of FullyShardedModule, which lists them once."""
    assert all(rank_result["stays"] for rank_result in actual)


def test_reduces_gradients_is_what_the_user_has_set(actual: list[dict[str, Any]]) -> None:
    assert all(rank_result["reduces"] == [True, False] for rank_result in actual)


def test_drop_unreduced_gradient_drops_what_was_accumulated_without_reduction(
    actual: list[dict[str, Any]],
) -> None:
    for rank_result in actual:
        assert rank_result["unsent"] == (True, True)


def test_unsharded_version_counts_writes_and_not_all_gathers(actual: list[dict[str, Any]]) -> None:
    """Use of clean_up_after_failure: see test_fsdp_traps.py."""
    for rank_result in actual:
        assert rank_result["writes"] == (0, 1)


def test_wrapped_optimizers_are_those_that_manual_optimization_sees() -> None:
    strategy = SingleDeviceStrategy()
    strategy.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]
    (wrapped,) = _lightning.wrapped_optimizers(strategy)
    assert wrapped.optimizer is strategy.optimizers[0]


def _drawn_on_a_rank() -> list[str]:
    rank, num_ranks = rank_and_num_ranks()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    tensor = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (num_ranks,)), [Shard(0)])
    seen: list[str] = []

    def draw(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seen.append(operator.name().partition("::")[2])
        return args[0]

    undo = _fully_shard.draw_dtensors_with(draw)
    tensor.normal_()
    torch.randn_like(tensor)
    tensor.uniform_()
    undo()
    tensor.normal_()
    return seen


def test_draw_dtensors_with_gets_random_operators_until_it_is_undone() -> None:
    assert run_on_ranks(_drawn_on_a_rank, 2) == [["normal_", "randn_like", "uniform_"]] * 2


def _undone() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (rank_and_num_ranks()[1],))
    inner = nn.Linear(3, 4)
    module = nn.Sequential(inner, nn.Linear(4, 5))
    initial = {name: set(vars(part)) for name, part in module.named_modules()}
    retained = module.register_forward_hook(_hook_of_the_users)
    _fully_shard.make_fully_sharded_class(type(module))
    fully_shard(module, mesh=mesh)
    assert module(torch.ones(2, 3)).shape == (2, 5)
    module.reshard()
    full = {name: parameter.full_tensor() for name, parameter in module.named_parameters()}
    for name, value in full.items():
        path, _, own_part = name.rpartition(".")
        setattr(module.get_submodule(path), own_part, nn.Parameter(value))
    for part in list(module.modules()):
        _fully_shard.undo_fully_shard(part, "no.package", ())
    is_equal = {name: set(vars(part)) ^ initial[name] for name, part in module.named_modules()}
    memory = io.BytesIO()
    torch.save(module, memory)
    assert list(module._forward_hooks) == [retained.id]
    fully_shard(module, mesh=mesh)  # as if for the first time
    return {"same": is_equal, "class": type(module).__name__, "size": memory.tell()}


def _hook_of_the_users(*_: Any) -> None:
    pass


def test_undo_fully_shard_leaves_a_module_that_is_pickled_and_sharded_again() -> None:
    for rank_result in run_on_ranks(_undone, 2):
        assert not any(rank_result["same"].values()), rank_result
        assert rank_result["class"] == "Sequential", (
            "the class that make_fully_sharded_class has made"
        )
        assert rank_result["size"]


def _hooked() -> list[bool]:
    rank, num_ranks = rank_and_num_ranks()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    actual = [_torch.has_comm_hook(ddp)]
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return [*actual, _torch.has_comm_hook(ddp)]


def test_has_comm_hook_tells_that_a_hook_was_registered() -> None:
    assert run_on_ranks(_hooked, 1) == [[False, True]]


def test_split_ranks_splits_a_bound_communicator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = torch.distributed
    assert {"split_ranks", "timeout"} <= inspect.signature(
        inspect.unwrap(dist.split_group)
    ).parameters.keys()
    asked: list[Any] = []
    monkeypatch.setattr(dist, "split_group", lambda **asks: asked.append(asks) or "split")
    monkeypatch.setattr(
        dist, "new_subgroups_by_enumeration", lambda members, timeout: (members, [])
    )
    limit = timedelta(seconds=1)
    assert _fully_shard.split_ranks([[0], [1]], limit) == [[0], [1]]
    group = torch.distributed.ProcessGroup(0, 1)
    assert group.bound_device_id is None
    bound = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cuda", 0)))
    monkeypatch.setattr(dist, "group", bound)
    assert _fully_shard.split_ranks([[0], [1]], limit) == "split"
    assert asked == [{"split_ranks": [[0], [1]], "timeout": limit}]

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import tensors as _tensors
from lightning_distrec._compat import torch as _torch
from lightning_distrec._compat import torch_distributed as _fully_shard
from tests.support.ranks import join_group, rank_and_num_ranks, run_each_on_ranks


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


def _meet() -> DeviceMesh:
    _, num_ranks = join_group()
    return init_device_mesh("cpu", (num_ranks,))


def _placed() -> dict[str, Any]:
    mesh, (rank, num_ranks) = _meet(), rank_and_num_ranks()
    full = torch.arange(5 * 4.0).view(5, 4)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    (row, column), local = _tensors.local_offsets(sharded), sharded.to_local()
    groups = [torch.distributed.new_group([rank]) for rank in range(num_ranks)]
    shards = [LocalShard(torch.zeros(2), ShardMetadata([0], [2], f"rank:{rank}/cpu"))]
    replica = init_from_local_shards(shards, [2], process_group=groups[rank])
    return {
        "begins there": torch.equal(full[row : row + len(local), column : column + 4], local),
        "is first replica": _tensors.is_first_replica(replica),
    }


def _sharded() -> dict[str, Any]:
    mesh, net, place = _meet(), Net(), SimpleNamespace()
    fully_shard(net.low, mesh=mesh)
    _fully_shard.assign_to(net.low, {id(net.low.weight): [place]})
    fully_shard(net, mesh=mesh)
    net(torch.ones(2, 5))
    net.reshard()
    state = _fully_shard.without_fully_shard(dict(vars(net)))
    plain = _fully_shard.class_before_fully_shard(net)
    own_values: nn.Module = plain.__new__(plain)
    own_values.__setstate__(state | {"_modules": {}})
    hooks = [*own_values._forward_pre_hooks.values(), *own_values._forward_hooks.values()]
    high = copy.deepcopy(net.high)
    hooks_of_state = [(len(high._state_dict_pre_hooks), len(high._load_state_dict_pre_hooks))]
    _fully_shard.drop_state_dict_hooks(high)
    hooks_of_state += [(len(high._state_dict_pre_hooks), len(high._load_state_dict_pre_hooks))]
    _torch.apply_to_tensors(net, lambda tensor: tensor * 0)
    net(torch.ones(2, 5)).sum().backward()
    reduces = [_fully_shard.reduces_gradients(net.low)]
    net.set_requires_gradient_sync(False)
    reduces.append(_fully_shard.reduces_gradients(net.low))
    net(torch.ones(2, 5)).sum().backward()
    (sharded, gathered), *_ = _fully_shard.sharded_and_unsharded_parameters(net.low)
    unsent = [_fully_shard.unsharded_parameter(gathered).grad is None]
    _fully_shard.drop_unreduced_gradient(gathered)
    weight = _fully_shard.unsharded_parameter(gathered)
    unsent.append(weight.grad is None)
    versions = [weight._version]
    net(torch.ones(2, 5))
    versions.append(weight._version)
    net.low.unshard()
    follows = [place.parameter is net.low.weight, isinstance(place.parameter, DTensor)]
    with torch.no_grad():
        weight.add_(1)
    versions.append(weight._version)
    _fully_shard.reset_after_failure(net)
    follows += [place.parameter is net.low.weight, isinstance(place.parameter, DTensor)]
    return {
        "gathered": (sharded is net.low.weight, tuple(weight.shape)),
        "place follows": follows,
        "weight is made once": _fully_shard.unsharded_parameter(gathered) is weight,
        "reduces": reduces,
        "has no unsent gradient": unsent,
        "writes, not all-gathers": [version - versions[0] for version in versions],
        "class": plain.__name__,
        "is sharded": [isinstance(module, FSDPModule) for module in (net, own_values)],
        "hooks left": [hook.__name__ for hook in hooks],
        "pickles": torch.save(dict(state, _modules={}, _parameters={}), io.BytesIO()) is None,
        "hooks of state": hooks_of_state,
        "still sharded": all(isinstance(parameter, DTensor) for parameter in net.parameters()),
        "emptied": float(net.low.weight.full_tensor().abs().sum()),
    }


def _drawn() -> list[str]:
    tensor, seen = distribute_tensor(torch.zeros(4, 2), _meet(), [Shard(0)]), []

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


def _undone() -> dict[str, Any]:
    mesh = _meet()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
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
    changes = {name: set(vars(part)) ^ initial[name] for name, part in module.named_modules()}
    torch.save(module, io.BytesIO())
    assert list(module._forward_hooks) == [retained.id]
    fully_shard(module, mesh=mesh)  # as if for the first time
    return {"changed": any(changes.values()), "class": type(module).__name__}


def _hook_of_the_users(*_: Any) -> None:
    pass


def _hooked() -> list[bool]:
    _meet()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    actual = [_torch.has_comm_hook(ddp)]
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return [*actual, _torch.has_comm_hook(ddp)]


def test_what_ranks_use_of_fully_sharded_modules_and_of_ddp_is_as_we_take_it_to_be() -> None:
    """Use of clean_up_after_failure: see test_fsdp_traps.py. Use of FullyShardedModule, which lists
    parameters once."""
    calls = {call.__name__: (call,) for call in (_placed, _sharded, _drawn, _undone, _hooked)}
    for rank, actual in enumerate(run_each_on_ranks(calls, 2)):
        assert actual["_placed"] == {"begins there": True, "is first replica": rank == 0}
        assert actual["_sharded"] == {
            "gathered": (True, (4, 5)),
            "place follows": [True, False, True, True],
            "weight is made once": True,
            "reduces": [True, False],
            "has no unsent gradient": [False, True],
            "writes, not all-gathers": [0, 0, 1],
            "class": "Net",
            "is sharded": [True, False],
            "hooks left": ["_count"],
            "pickles": True,
            "hooks of state": [(1, 1), (0, 0)],
            "still sharded": True,
            "emptied": 0.0,
        }
        assert actual["_drawn"] == ["normal_", "randn_like", "uniform_"]
        # The class is the one that make_fully_sharded_class has made.
        assert actual["_undone"] == {"changed": False, "class": "Sequential"}
        assert actual["_hooked"] == [False, True]


def test_is_view_tells_views() -> None:
    memory = torch.ones(2, 2, requires_grad=True) * 2
    assert _torch.is_view(memory.view(4))
    assert not _torch.is_view(memory)


def test_set_device_and_mesh_sets_what_a_lightning_module_returns() -> None:
    module = LightningModule()
    _lightning.set_device_and_mesh(module, torch.device("meta"), "a mesh")
    assert module.device.type == "meta"
    assert module.device_mesh == "a mesh"


def test_wrapped_optimizers_are_those_that_manual_optimization_sees() -> None:
    strategy = SingleDeviceStrategy()
    strategy.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]
    (wrapped,) = _lightning.wrapped_optimizers(strategy)
    assert wrapped.optimizer is strategy.optimizers[0]


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

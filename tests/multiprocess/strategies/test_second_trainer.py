"""A strategy object outlives its Trainer: packages give one to several, copy it, and pickle it with
their settings."""

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from tests.support.dense_models import BagsBefore, loader, whole_batches
from tests.support.ranks import (
    THREADS_HAVE_NAMES,
    num_socket_threads,
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_ranks,
    run_on_warm_ranks,
)
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "pipeline_parallel": lambda: PipelineParallelStrategy(microbatches=2),
    "torchrec_sharded": TorchRecShardedStrategy,
}
SHARDED = ("fsdp_tuned", "torchrec_sharded")


class MakesTrainer(BagsBefore):
    """Makes another Trainer with its strategy while it trains."""

    def on_train_start(self) -> None:
        _trainer(self.trainer.strategy)


def _trainer(strategy: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **DEFAULTS)


def _fit(trainer: pl.Trainer, name: str, kind: type[BagsBefore] = BagsBefore) -> list[float]:
    pl.seed_everything(5)
    model = kind(name == "torchrec_sharded")
    rank, num_ranks = rank_and_num_ranks()
    trainer.fit(model, whole_batches(2) if name == "pipeline_parallel" else loader(rank, num_ranks))
    return model.losses


def _words(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _reuse(name: str) -> dict[str, Any]:
    strategy = STRATEGIES[name]()
    first = _trainer(strategy)
    early = _words(lambda: strategy.exchange(0))
    losses = [_fit(first, name)]
    exchanged = strategy.exchange({"rank": strategy.global_rank, 0: ("host", torch.arange(2))})
    pickled: list[bytes] = []
    said = {"pickle": _words(lambda: pickled.append(pickle.dumps(strategy)))}
    second = _trainer(strategy)
    losses.append(_fit(second, name))
    first.fit_loop.max_epochs = 2  # it counts its epochs
    losses.append(_fit(first, name))
    if pickled:
        losses.append(_fit(_trainer(pickle.loads(pickled[0])), name))
    losses.append(_fit(_trainer(copy.deepcopy(STRATEGIES[name]())), name))
    said["copy"] = _words(lambda: copy.deepcopy(strategy))
    said["within"] = _words(lambda: _fit(_trainer(STRATEGIES[name]()), name, MakesTrainer))
    said["fabric"] = _words(lambda: Fabric(strategy=strategy, devices=1))
    said |= {
        "early": early,
        "types": _words(lambda: strategy.exchange((lambda: 0) if strategy.global_rank else None)),
    }
    return {"losses": losses, "said": said, "exchanged": exchanged}


def _train_tables_elsewhere() -> dict[str, str]:
    """Return what other strategies say to a module whose tables are sharded, which goes on
    afterwards."""
    module = BagsBefore(has_table=True)

    def fit(strategy: Any) -> None:
        _trainer(strategy).fit(module, loader(*rank_and_num_ranks()))

    fit(TorchRecShardedStrategy())
    others = {name: make for name, make in STRATEGIES.items() if name != "torchrec_sharded"}
    said = {name: _words(partial(fit, make())) for name, make in others.items()}
    fit(TorchRecShardedStrategy())
    return said


def test_trainers_share_a_strategy_or_are_told_why_not() -> None:
    ranks = run_each_on_ranks({name: (_reuse, name) for name in STRATEGIES}, 2)
    for rank, name in itertools.product(range(2), STRATEGIES):
        first, *others = ranks[rank][name]["losses"]
        # Of a pipeline the last stage alone computes losses.
        assert len(first) == (0 if name == "pipeline_parallel" and rank == 0 else 6)
        assert len(others) == (3 if name in SHARDED else 4)
        assert all(losses == first for losses in others)
        said = ranks[rank][name]["said"]
        assert said["copy"] == ""
        pickled = "ShardingError: a sharded module cannot be pickled: this rank has only"
        assert said["pickle"].startswith(pickled) if name in SHARDED else said["pickle"] == ""
        assert said["within"].startswith("ConfigError: this ")
        assert "is in a run of another Trainer (trainer.fit). Give a Trainer" in said["within"]
        assert "for lightning.pytorch's Trainer, not for Fabric" in said["fabric"]
        exchanged = ranks[rank][name]["exchanged"]
        assert [value["rank"] for value in exchanged] == [0, 1]
        assert torch.equal(exchanged[1 - rank][0][1], torch.arange(2))
        assert "the ranks have not met yet" in said["early"]
        words = "RankError: rank 1: a value of type function cannot be sent to other ranks: "
        assert said["types"].startswith(words)


def test_sharded_tables_are_refused_by_strategies_that_would_train_each_shard_as_a_whole() -> None:
    for said in run_on_warm_ranks(_train_tables_elsewhere, 2):
        for name, words in said.items():
            assert words.startswith(
                f"ConfigError: {name}: tables of 'bags' were sharded over the ranks by an earlier "
                "run"
            )


def _join_and_fit() -> tuple[tuple[int, int, int], int]:
    """Return the nodes that a Trainer counts, and this rank's, in a process group that a script has
    made before; and the threads for sockets."""
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    strategy = TorchRecShardedStrategy()
    _fit(_trainer(strategy), "torchrec_sharded")
    place = strategy.num_nodes, strategy.node_rank, strategy.local_rank
    return place, num_socket_threads()


def test_ranks_that_have_met_before_the_trainer_count_their_nodes_too() -> None:
    (first, threads), (second, _) = run_on_ranks(_join_and_fit, 2)
    assert (first, second) == ((1, 0, 0), (1, 0, 1))
    # As in a group that a Trainer makes: one serves a step, one what is agreed on now and then.
    assert threads == 2 or not THREADS_HAVE_NAMES


def _train_alone_and_then_with_others() -> str:
    """Return what a Trainer of two ranks says in a process that no launcher has started, and where
    one of one rank has trained."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(variable, None)

    def fit(devices: int) -> None:
        strategy = TunedDDPStrategy()
        pl.Trainer(strategy=strategy, devices=devices, **DEFAULTS).fit(BagsBefore(), loader())

    fit(1)
    return _words(partial(fit, 2))


def test_a_trainer_of_more_ranks_than_the_process_has_does_not_train_alone() -> None:
    (said,) = run_on_ranks(_train_alone_and_then_with_others, 1)
    assert said.startswith(
        "ConfigError: this Trainer has 2 ranks, and this process is one of 1, of an earlier "
        "Trainer."
    )

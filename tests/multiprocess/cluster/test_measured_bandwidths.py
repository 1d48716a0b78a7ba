"""Bandwidths that ranks measure: near a plain timing, the same on all, and told in the start
table."""

import contextlib
import io
import logging
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_distrec.cluster.consensus import Consensus, job_consensus
from lightning_distrec.sharding.planning.bandwidths import NAMES, measured_bandwidths
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

CPU = torch.device("cpu")
PLAIN_BYTES = 64 * 2**20
Said = dict[str, tuple[float, str]]


def _meet() -> Consensus:
    if not dist.is_initialized():
        rank, num_ranks = rank_and_num_ranks()
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    return job_consensus(60.0).general


def _measure(nodes: tuple[int, ...]) -> Said:
    ranks = _meet()
    bandwidths = measured_bandwidths(NAMES, NodeLayout.from_node_sizes(*nodes), CPU, ranks)
    return {
        name: (bandwidth.bytes_per_second, bandwidth.origin)
        for name, bandwidth in bandwidths.items()
    }


def _plain_exchange() -> float:
    """Return what this rank sends to the others in a second of a plain all-to-all."""
    num_ranks = dist.get_world_size()
    sent = torch.zeros(PLAIN_BYTES // num_ranks * num_ranks, dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    dist.barrier()
    began = time.perf_counter()
    dist.all_to_all_single(received, sent)
    return sent.numel() / num_ranks * (num_ranks - 1) / (time.perf_counter() - began)


def _plain_copy() -> float:
    source = torch.ones(PLAIN_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    began = time.perf_counter()
    target.copy_(source)
    return 2 * source.numel() / (time.perf_counter() - began)


def _beside_plain_timings() -> tuple[Said, list[float], list[float]]:
    _meet()
    exchanges, copies = [_plain_exchange() for _ in range(3)], [_plain_copy() for _ in range(3)]
    bandwidths = _measure((2,))
    return (
        bandwidths,
        exchanges + [_plain_exchange() for _ in range(3)],
        copies + [_plain_copy() for _ in range(3)],
    )


@pytest.mark.slow
def test_what_is_measured_is_near_plain_timings_and_the_same_on_all_ranks() -> None:
    seen = []
    for _ in range(4):  # a machine that others use too is fast at one moment and slow at another
        results = run_on_warm_ranks(_beside_plain_timings, 2)
        bandwidths = results[0][0]
        assert bandwidths == results[1][0]
        assert set(bandwidths) == {"intra_node", "host_memory"}, "one node, and no GPU"
        assert all(origin == "measured" for _, origin in bandwidths.values())
        places = {"intra_node": 1, "host_memory": 2}
        plain = {
            name: [number for result in results for number in result[index]]
            for name, index in places.items()
        }
        seen.append((bandwidths, plain))
        if all(min(some) / 2 < bandwidths[name][0] < max(some) * 2 for name, some in plain.items()):
            return
    pytest.fail(f"never near: {seen}")


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ((1, 1, 1), {"cross_node", "host_memory"}),
        ((2, 1), {"intra_node", "cross_node", "host_memory"}),
    ],
)
def test_there_is_what_these_nodes_have(nodes: tuple[int, ...], names: set[str]) -> None:
    results = run_on_warm_ranks(_measure, 3, nodes)
    assert all(set(result) == names for result in results)
    assert results[0] == results[1] == results[2]


def _fit(planning: dict[str, Any], environment: dict[str, str]) -> tuple[str, int]:
    """Return what was printed at the start or raised, and how many steps were taken."""
    os.environ |= environment
    out = io.StringIO()
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler := logging.StreamHandler(out))
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    trainer = make_trainer({"planning": planning, "memory_bytes_per_rank": 10**9}, max_steps=1)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            trainer.fit(model, rank_loader(2, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    finally:
        logger.removeHandler(handler)
    return out.getvalue(), len(model.losses)


class NotesRanks(ClickModel):
    """Keeps which ranks each table was given to."""

    def on_train_start(self) -> None:
        setup = self.trainer.strategy.run_tables
        self.ranks = {t.name: setup.shards.plan[t.full_name].ranks for t in setup.shards.tables}


def _fit_with_memory(memory_by_rank: tuple[int, int]) -> str:
    """Return which ranks the tables were given to, or what was raised."""
    rank = rank_and_num_ranks()[0]
    model = seeded(NotesRanks, torch.optim.SGD, {"lr": 0.1})
    options: dict[str, Any] = {
        "memory_bytes_per_rank": memory_by_rank[rank],
        "batch_size_per_rank": 1,
    }
    # the default keeps what the layers need, which is more
    options["planning"] = {"reserve": "15%"}
    try:
        make_trainer(options | {"sharding_types": ["table_wise"]}, max_steps=1).fit(
            model, rank_loader(2, rank)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(f"{name} on {ranks}" for name, ranks in model.ranks.items())


def test_a_table_goes_to_the_rank_that_has_the_memory() -> None:
    for message in run_on_warm_ranks(_fit_with_memory, 2, (3000, 10**6)):
        assert "wide on [1]" in message


def test_what_ranks_cannot_plan_with_is_refused_on_every_rank() -> None:
    calls = {
        "memory_bytes_per_rank=-1: must be above 0": (_fit_with_memory, (10**6, -1)),
        "STORAGE_RESERVE_PERCENT='150': the share of each rank's memory": (
            _fit,
            {},
            {"STORAGE_RESERVE_PERCENT": "150"},
        ),
        "nothing is left for tables": (_fit, {"reserve": "2GB"}, {}),
    }
    for message, (function, *args) in calls.items():
        for outcome in run_on_warm_ranks(function, 2, *args):
            text = outcome if isinstance(outcome, str) else outcome[0]
            assert re.match("(ConfigError|PlanError): ", text), text
            assert message in text

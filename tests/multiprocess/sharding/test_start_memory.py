"""What a rank holds at most while tables that were built whole are sharded; and ranks that cannot
hold it say so."""

import resource
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec.errors import ShardingError
from lightning_distrec.host_memory import _meminfo
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

MIB = 2**20
ROWS, DIM, NUM_TABLES = 1_500_000, 32, 2
WHOLE = ROWS * DIM * 4
"""Bytes of a table: 183 MiB."""


class Bags(pl.LightningModule):
    """Two embedding bags, built in __init__."""

    def __init__(self, num_rows: int = ROWS) -> None:
        super().__init__()
        # Not drawn, which takes longer than all else; but written, so that the memory is taken.
        weights = [torch.full((num_rows, DIM), float(number)) for number in range(NUM_TABLES)]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(num_rows, DIM, mode="sum", _weight=weight) for weight in weights
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return sum((bag(batch).mean() for bag in self.bags), torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def _fit(model: Bags) -> None:
    loader = DataLoader(torch.arange(32).view(8, 4), batch_size=2)
    make_trainer(
        {"sharding_types": ["row_wise"], "convert_embeddings": "all"}, max_steps=1, max_epochs=None
    ).fit(model, loader)


def _status(name: str) -> int:
    return _meminfo(name, "/proc/self/status")


def _growth() -> tuple[int, int, int]:
    _fit(Bags(64))  # what is loaded and started once
    before = _status("VmRSS:")
    model = Bags()
    _fit(model)
    peak, after = _status("VmHWM:") - before, _status("VmRSS:") - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    _fit(model)
    return peak, after, _status("VmHWM:") - before


def test_peak_is_whole_tables_and_a_share_on_rank_zero_and_whole_tables_on_others() -> None:
    runs: list[Any] = []
    while len(runs) < 3:
        runs.append(run_on_ranks(_growth, 2))
        # A machine that runs other tests has added 120 MiB to one rank, once.
        peaks, after, second = [
            [min(run[r][i] for run in runs) for r in range(2)] for i in range(3)
        ]
        if max(peaks[1], *after, *second) < 1.05 * NUM_TABLES * WHOLE + 80 * MIB:
            break
    # of two ranks: half of the rows and of as much state
    whole, share = NUM_TABLES * WHOLE, NUM_TABLES * WHOLE
    # Rank 0 has filled one table's shards, and freed that table, before the other's are made.
    assert whole < peaks[0] < 1.05 * (whole + share / NUM_TABLES) + 80 * MIB, (
        f"{peaks[0] / MIB:.0f} MiB"
    )
    # Nothing of rank 1's own rows is left when its shards are made, nor any state for them.
    assert whole < peaks[1] < 1.05 * whole + 80 * MIB, f"{peaks[1] / MIB:.0f} MiB"
    assert max(after) < 1.05 * share + 80 * MIB
    # The rows of the first fit's shards are freed as they are copied, and its state before.
    assert max(second) < 1.05 * share + 80 * MIB, f"{max(second) / MIB:.0f} MiB"


def _warnings_of_a_small_node() -> str:
    place = "lightning_distrec.strategies.tables.cluster_facts.host_memory_bytes"
    with patch(place, return_value=2**20), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(Bags(4096))
    return " ".join(str(warning.message) for warning in caught)


def test_full_tables_of_all_ranks_of_a_node_are_a_warning_where_they_are_large() -> None:
    message = (
        "2 ranks of a node have built 1.0 MiB of full tables each, 2.0 MiB of its 1.0 MiB, "
        "before the strategy"
    )
    first, second = run_on_warm_ranks(_warnings_of_a_small_node, 2)
    assert message in first
    assert message not in second


def _fit_after_a_failure() -> None:
    model = Bags(64)
    _fit(model)
    place = "lightning_distrec.strategies.tables.set_up.TableSharding.shard"
    with patch(place, side_effect=MemoryError), pytest.raises(MemoryError):
        _fit(model)
    with pytest.raises(
        ShardingError, match="failed while rows moved to other shards, and they are lost. Build the"
    ):
        _fit(model)


def test_a_module_that_lost_its_rows_in_a_failed_set_up_is_refused() -> None:
    run_on_ranks(_fit_after_a_failure, 1)


def _fit_within(spare_bytes: int) -> None:
    _fit(Bags(64))
    model = Bags()
    if rank_and_num_ranks()[0] == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData:") + spare_bytes, hard))
    _fit(model)


def test_ranks_say_which_tables_do_not_fit_before_one_is_ended_by_a_limit() -> None:
    with pytest.raises(RankFailed) as failure:
        run_on_ranks(_fit_within, 2, WHOLE)  # half of the shards and their state
    message = str(failure.value)
    assert message.count("rank 0's process cannot hold its shards") >= 2, (
        "both ranks raise the same"
    )
    assert "table 'bags.0' (1,500,000 x 32): 183.1 MiB in full on every rank" in message
    assert (
        "Build tables in configure_model or under meta_tables(): no rank holds a full one then. "
        "Or use more" in message
    )

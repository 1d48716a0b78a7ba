"""Programs with losses over an item table, on CUDA devices in host memory: they have the numbers of
one process, no hazard, and no wait of the host but those that a call needs."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_distrec.retrieval import in_batch_loss, sampled_softmax_loss, softmax_loss
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.host_waits import WaitsOfSteps
from tests.support.retrieval_models import Batch, Retrieving, make_batch, seeded, strategy_of, train
from tests.support.retrieval_programs import assert_as_one_process, draw_program, run

SEEDS = range(2)


def _run_each(num_ranks: int, seeds: range) -> dict[int, Any]:
    results = {}
    for seed in seeds:
        result = run(draw_program(seed, num_ranks), accelerator="gpu")
        state = {key: value.cpu() for key, value in result["state"].items()}
        results[seed] = {"state": state, "losses": result["losses"]}
    return results


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(2, 24), marks=pytest.mark.slow)])
def test_programs_on_devices_have_the_numbers_of_one_process(
    devices: DeviceRanks, seeds: range
) -> None:
    seen = devices.call(_run_each, 2, seeds)
    for rank in seen:
        assert not rank.error, rank.error
        assert rank.hazards == []
    for seed in seeds:
        losses = [rank.result[seed]["losses"] for rank in seen]
        state = seen[0].result[seed]["state"]
        assert_as_one_process(str(seed), draw_program(seed, 2), state, losses)


def _full(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return softmax_loss(queries, model.table, batch["targets"])


def _ordinary(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(queries @ model.items.weight.T, batch["targets"])


def _sampled(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    step = len(model.losses)
    return sampled_softmax_loss(queries, model.table, batch["targets"], num_negatives=5, step=step)


def _in_batch(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return in_batch_loss(queries, queries * 2, batch["targets"])


def _looked_up(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return queries.square().mean()


CALLS: dict[str, tuple[Any, int]] = {
    "softmax_loss": (_full, 1),
    "an ordinary module": (_ordinary, 1),
    "in_batch_loss": (_in_batch, 1),
}
"""Name -> loss, and how often the host waits for it in a step."""
FIRST, COUNTED = 3, 2


def _waits(loss: Any) -> dict[str, float]:
    strategy = strategy_of("embedding", "row_wise", find_unused_parameters=True)
    strategy |= {"embedding_update": "sparse", "convert_embeddings": ["items"]}
    counting = WaitsOfSteps(FIRST, COUNTED)
    batches = [[make_batch(step, 4)] * 2 for step in range(FIRST + COUNTED + 1)]
    model = seeded("embedding", loss, "SGD")
    train(model, batches, strategy, accelerator="gpu", callbacks=[counting])
    return {place: count / COUNTED for place, count in counting.waits.items()}


def _waits_of_each() -> dict[str, dict[str, float]]:
    waits = {"none": _waits(_looked_up)}
    for name, (loss, _) in CALLS.items():
        waits[name] = _waits(loss)
    waits["sampled"] = _waits(_sampled)
    return waits


def test_the_host_waits_no_more_than_a_call_needs(devices: DeviceRanks) -> None:
    seen = devices.call(_waits_of_each)
    for rank in seen:
        assert not rank.error, rank.error
        waits = rank.result
        without = sum(waits["none"].values())
        for name, (_, expected) in CALLS.items():
            assert sum(waits[name].values()) - without == expected, (
                name,
                waits[name],
                waits["none"],
            )
        # Without those of its lookup.
        own = [place for place in waits["sampled"] if "scores/" in place or "retrieval/" in place]
        assert [waits["sampled"][place] for place in own] == [1], own


ROWS_OF_LARGE, LARGE_DIM = 100_000, 8
MAX_BYTES = 2**18


def _peak_bytes() -> float:
    """Return the memory that a step takes at its peak, without what is there before."""
    peaks = []

    class Measured(Retrieving):
        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            gc.collect()  # of earlier fits
            self.before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            peaks.append(torch.cuda.max_memory_allocated(self.device) - self.before)

    def loss(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
        return softmax_loss(queries, model.table, batch["targets"], max_bytes=MAX_BYTES)

    strategy = strategy_of("embedding", "row_wise", find_unused_parameters=True)
    strategy["embedding_update"] = "sparse"
    batches = [[make_batch(step, 64)] * 2 for step in range(4)]
    model = Measured("embedding", loss, "SGD", ROWS_OF_LARGE)
    train(model, batches, strategy, accelerator="gpu")
    return float(peaks[-1])


def test_a_step_takes_the_gradient_of_a_share_and_a_block_of_scores(devices: DeviceRanks) -> None:
    share = ROWS_OF_LARGE // 2 * LARGE_DIM * 4
    for rank in devices.call(_peak_bytes):
        assert not rank.error, rank.error
        # Autograd adds the gradient of lookups to the loss's, for which it takes another share.
        assert 0.9 * share <= rank.result <= 2 * share + MAX_BYTES

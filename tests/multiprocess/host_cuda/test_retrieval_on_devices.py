"""Programs with losses over an item table, on CUDA devices in host memory: they have the numbers of
one process, no hazard, and no wait of the host but those that a call needs."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_distrec.retrieval import in_batch_loss, sampled_softmax_loss, softmax_loss
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.host_waits import WaitsOfSteps
from tests.support.retrieval_models import Batch, Retrieving, make_batch, seeded, strategy_of, train
from tests.support.retrieval_programs import assert_as_one_process, draw_program, run

SEEDS = range(2)


def _run_each() -> dict[int, Any]:
    results = {}
    for seed in SEEDS:
        result = run(draw_program(seed, 2), accelerator="gpu")
        state = {key: value.cpu() for key, value in result["state"].items()}
        results[seed] = {"state": state, "losses": result["losses"]}
    return results


def test_programs_on_devices_have_the_numbers_of_one_process(devices: DeviceRanks) -> None:
    seen = devices.call(_run_each)
    for rank in seen:
        assert not rank.error, rank.error
        assert rank.hazards == []
    for seed in SEEDS:
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

"""Tables whose weights are read in the step: gathered from all ranks on request, with the numbers
of one process."""

import logging
import logging.handlers
import re
import warnings
from typing import Any

import pytest
import torch

from lightning_distrec import TableOptions
from lightning_distrec.errors import ConfigError
from tests.support.click_model import seeded
from tests.support.embedding_models import (
    loader,
    pairs,
    sequences,
    too_far,
    train_unsharded,
    whole_state,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.tied_models import LightGCN, TiedSASRec
from tests.support.trainers import make_trainer

STEPS = 4
POSITIONS = {"position_embedding": {"replicated": True}}
GATHERED = {"*": {"gathered_weight": True}}
MODELS: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "sasrec": (TiedSASRec, sequences, {"convert_embeddings": ["item_embedding"]}),
    "lightgcn": (LightGCN, pairs, {"convert_embeddings": "all"}),
}


def _train(name: str, types: list[str], depth: int) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    kind, batch_of, strategy = MODELS[name]
    model = seeded(kind)
    own_values = {"sharding_types": types, "tables": GATHERED, "prefetch": {"depth": depth}}
    trainer = make_trainer(strategy | own_values)
    batches = loader([batch_of(step, rank) for step in range(STEPS)])
    trainer.fit(model, batches, loader([batch_of(STEPS, rank)]))
    predicted = trainer.predict(model, loader([batch_of(STEPS, rank)]))[0]  # type: ignore[index]
    with torch.no_grad():
        called = model.predict_step(batch_of(STEPS, rank), 0)
    reason = [] if trainer.strategy.run_tables is None else [trainer.strategy.run_tables.updates]  # type: ignore[attr-defined]
    return {"state": whole_state(model), "predicted": predicted, "called": called, "why": reason}


@pytest.mark.parametrize(
    ("num_ranks", "types"),
    [
        (2, ["row_wise"]),
        (2, ["column_wise"]),
        pytest.param(3, ["table_wise"], marks=pytest.mark.slow),
    ],
)
def test_gathered_weights_train_as_in_one_process(num_ranks: int, types: list[str]) -> None:
    cases = {name: (_train, name, types, depth) for depth, name in zip((3, 1), MODELS, strict=True)}
    actual = run_each_on_ranks(cases, num_ranks)
    for name, (kind, batch_of, _) in MODELS.items():
        batches = [[batch_of(step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
        expected = train_unsharded(seeded(kind), batches)
        assert too_far(actual[0][name]["state"], expected.state_dict(), 1e-5) == {}, name
        for rank in range(num_ranks):
            scores = expected.eval().predict_step(batch_of(STEPS, rank), 0)
            for description in ("predicted", "called"):
                torch.testing.assert_close(
                    actual[rank][name][description], scores, atol=1e-4, rtol=1e-4
                )


def test_options_that_a_gathered_weight_cannot_have_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape("embedding_update='fused': a weight that is read has a gradient"),
    ):
        TableOptions(gathered_weight=True, embedding_update="fused")
    with pytest.raises(ConfigError, match="data_parallel tables are not gathered"):
        TableOptions(gathered_weight=True, sharding_types=["data_parallel"])
    with pytest.raises(ConfigError, match="gathered_weight would change nothing"):
        TableOptions(gathered_weight=True, replicated=True)


def _left_whole(strategy: dict[str, Any]) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    rank, _ = rank_and_num_ranks()
    model = seeded(TiedSASRec)
    trainer = make_trainer(strategy)
    sharded: list[str] = []

    def note_sharded() -> None:
        tables = trainer.strategy.run_tables  # type: ignore[attr-defined]
        sharded.extend([] if tables is None else tables.updates)

    model.on_train_start = note_sharded  # type: ignore[method-assign]
    logger, handler = (
        logging.getLogger("lightning.pytorch"),
        logging.handlers.BufferingHandler(10**6),
    )
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader([sequences(step, rank) for step in range(STEPS)]))
    logger.removeHandler(handler)
    lines = [record.getMessage() for record in handler.buffer]
    return [str(warning.message) for warning in caught] + lines, sharded, whole_state(model)


def test_tables_whose_weight_is_read_stay_on_every_rank_unless_they_are_gathered() -> None:
    texts, sharded, state = run_on_warm_ranks(_left_whole, 2, {"convert_embeddings": "all"})[0]
    assert sharded == ["position_embedding"]
    message = (
        "'item_embedding' is not sharded, every rank has all of it: its weight is read in "
        "TiedSASRec."
    )
    assert [
        text for text in texts if text.startswith(message) and "{'gathered_weight': True}" in text
    ]
    batches = [[sequences(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_unsharded(seeded(TiedSASRec), batches).state_dict()
    assert too_far(state, expected, 1e-5) == {}
    # Where it is the only table, nothing is sharded, and no line denies that there is one.
    texts, sharded, state = run_on_warm_ranks(
        _left_whole, 2, {"convert_embeddings": "all", "tables": POSITIONS}
    )[0]
    assert sharded == []
    # a warning, which many scripts hide, and a log line
    assert sum(text.startswith(message) for text in texts) == 2
    assert (
        "torchrec_sharded: no embedding table is sharded; the module trains as under plain DDP."
        in texts
    )
    assert not any("has no embedding tables" in text for text in texts)
    assert too_far(state, expected, 1e-5) == {}


def test_a_named_table_whose_weight_is_read_is_named_before_the_step_that_raises() -> None:
    message = (
        "(?s)Error: the weight of the sharded table 'item_embedding' was read .*gathered_weight"
    )
    with pytest.raises(RankFailed, match=message):
        run_on_warm_ranks(_left_whole, 2, {"convert_embeddings": ["item_embedding"]})
    with pytest.raises(
        RankFailed, match="UserWarning: the weight of table 'item_embedding' is read in TiedSASRec"
    ):
        run_on_warm_ranks(_raises_warnings, 2)


def _raises_warnings() -> None:
    model = seeded(TiedSASRec)
    trainer = make_trainer({"convert_embeddings": ["item_embedding"]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the weight of table")
        trainer.fit(model, loader([sequences(0, rank_and_num_ranks()[0])]))

"""Rows that are waited for when they are first touched are, to user code, the tensors of the
unsharded collection."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec.sharding.lookup.lazy_outputs import LazyJaggedTensor, LazyKeyedTensor
from tests.support.cases import Case, check
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.recognised_models import ROWS, STEPS, Bags, Sequences, draw, fit
from tests.support.trainers import make_trainer

USES: dict[str, Callable[[KeyedTensor], Tensor]] = {
    "whole": lambda kt: kt.values(),
    "keys_first": lambda kt: torch.cat([kt[key] for key in reversed(kt.keys())], 1),
    "by_name": lambda kt: kt["f@t"] * kt["f@u"][:, :8],
    "dict": lambda kt: torch.cat(list(kt.to_dict().values()), 1),
    "regroup": lambda kt: torch.cat(
        KeyedTensor.regroup([kt, kt], [kt.keys()[:1], kt.keys()[1:2]]), 1
    ),
    "regroup_as_dict": lambda kt: torch.cat(
        list(KeyedTensor.regroup_as_dict([kt], [kt.keys()[:2], kt.keys()[2:]], "ab").values()), 1
    ),
    "flattened": lambda kt: torch.cat(tree_flatten(kt)[0], 1),
    "rebuilt": lambda kt: tree_unflatten(*tree_flatten({"kt": kt}))["kt"].values(),
    "mapped": lambda kt: tree_map(lambda leaf: leaf * 2, [kt])[0].values(),
    "moved": lambda kt: kt.to(torch.device("cpu")).values(),
    "made_again": lambda kt: KeyedTensor(kt.keys(), kt.length_per_key(), kt.values()).values(),
    "said": lambda kt: (str(kt), repr(kt), kt.values())[2],
    "detached_too": lambda kt: kt.values() + kt.values().detach(),
    "by_position": lambda kt: kt.values()[:, kt.offset_per_key()[1] :],
    "awaited": lambda kt: _awaited(kt).values(),
    "columns": lambda kt: kt.values().split(kt.length_per_key(), dim=1)[0],
    "seen": lambda kt: _seen(kt, KeyedTensor.values).values(),
    "columns_seen": lambda kt: _seen(kt, lambda kt: kt["f@t"])["f@t"] * kt["f@u"][:, :8],
}
"""What user code does with bags; each returns what goes into a loss."""
# Values and columns are made of each other: of columns where sharding types differ, or of values.
for _name in ("seen", "columns_seen"):
    USES[f"{_name}_unequal"] = USES[f"{_name}_equal"] = USES[_name]


def _awaited(output: Any) -> Any:
    """As the tutorials of torchrec do with the outputs of sharded modules; unsharded ones have no
    `wait`."""
    return output.wait() if isinstance(output, (LazyKeyedTensor, LazyJaggedTensor)) else output


def _seen(output: KeyedTensor, part: Callable[[KeyedTensor], Tensor]) -> KeyedTensor:
    with torch.no_grad():
        assert not (part(output) * 2).requires_grad
    return output


class Uses(Bags):
    """Has bags for each use. is_sharded: counts what is sent ahead."""

    def __init__(self, is_sharded: bool = True) -> None:
        self.is_sharded = is_sharded
        super().__init__()

    def build(self) -> None:
        super().build()
        bags = self.ebc
        del self.ebc
        self.uses = torch.nn.ModuleDict({name: copy.deepcopy(bags) for name in USES})

    def prepared(self, batch: Any, step: int) -> Any:
        return KeyedJaggedTensor(["f", "g"], batch["values"], lengths=batch["lengths"])

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cat([USES[name](bags(batch)) for name, bags in self.uses.items()], 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def keep(self) -> None:
        if self.is_sharded:
            super().keep()


def features(step: int, rank: int) -> KeyedJaggedTensor:
    batch = draw(step, rank)
    return KeyedJaggedTensor(["f", "g"], batch["values"], lengths=batch["lengths"])


def counts(trainer: Any) -> tuple[int, int]:
    return trainer.lightning_module.counts["training 0"]


def test_whatever_user_code_does_with_bags_trains_as_unsharded() -> None:
    by_rows, by_tables = {"sharding_types": ["row_wise"]}, {"sharding_types": ["table_wise"]}
    tables = {
        "uses.*": by_tables,
        "uses.*_equal.*": by_rows,
        "uses.*_unequal.t": by_rows,
        "uses.*_unequal.u": by_tables,
    }
    case = Case(
        module=Uses,
        plain=partial(Uses, is_sharded=False),
        batch=features,
        steps=STEPS,
        strategy={"tables": tables, "prefetch": {"depth": 3}},
        limit=2e-6,
        rests=("by_position.embedding_bags.t.", "columns.embedding_bags.u."),
        look=counts,
    )
    for outcome in check(case):
        assert outcome.seen == (len(USES) * STEPS, len(USES) * (STEPS - 1))


# -- looking at one lookup


class Looks(Bags):
    """Notes what its outputs are before and after they are touched."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.noted: list[dict[str, Any]] = []
        super().__init__(optimizer)

    prepared = Uses.prepared

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.ebc(batch)
        self.noted.append({
            "is": isinstance(output, KeyedTensor),
            "keys": output.keys(),
            "widths": output.length_per_key(),
            "untouched": type(output) is LazyKeyedTensor,
            "shape": tuple(output.values().shape),
            "touched": type(output),
            "attributes": sorted(vars(output))
            == sorted(vars(KeyedTensor(["a"], [1], torch.ones(1, 1)))),
            "said": str(output),
            "gradient": output.values().requires_grad,
        })
        return output.values()


class LooksAtRows(Sequences):
    """The same over an EmbeddingCollection."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.noted: list[dict[str, Any]] = []
        super().__init__(optimizer)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.ec(batch[0])
        untouched = all(type(item) is LazyJaggedTensor for item in rows.values())
        lengths = _awaited(rows["f"]).lengths()
        self.noted.append({
            "are": [isinstance(item, JaggedTensor) for item in rows.values()],
            "keys": list(rows),
            "untouched": untouched,
            "lengths": torch.equal(lengths.long(), batch[0]["f"].lengths()),
            "offsets": torch.equal(rows["g"].offsets().long(), batch[0]["g"].offsets()),
            "touched": {type(item) for item in rows.values()},
            "weights": rows["f"].weights_or_none(),
            "dense": [tuple(bag.shape[1:]) for bag in rows["f"].to_dense()],
            "said": str(rows["g"]),
            "leaves": len(tree_flatten(rows)[0]),
            "padded": tuple(rows["g"].to_padded_dense(3).shape),
        })
        return torch.cat([rows["f"].values().sum(0), rows["g"].values().sum(0)]).unsqueeze(0)


def _noted(kind: type) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what is noted unsharded, and sharded."""
    model = kind()
    batches = [model.prepared(draw(step, rank_and_num_ranks()[0]), step) for step in range(STEPS)]
    model.noted.clear()
    for step, batch in enumerate(batches):
        model.rows(batch, step)
    plain, model.noted = model.noted, []
    make_trainer({"convert_embeddings": "all"}).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return plain, model.noted


@pytest.mark.parametrize("kind", [Looks, LooksAtRows])
def test_outputs_have_the_types_of_the_unsharded_collection(kind: type) -> None:
    for rank_result in run_each_on_ranks({"noted": (_noted, kind)}, 2):
        plain, sharded = rank_result["noted"]
        assert len(plain) == len(sharded) == STEPS
        for first, other in zip(plain, sharded, strict=True):
            assert not first.pop("untouched")
            assert other.pop("untouched")
            message, said_here = first.pop("said"), other.pop("said")
            assert message.split()[0] == said_here.split()[0]
            assert first == other


# -- touched at odd times


class TouchedLate(Bags):
    """Keeps its bags, and looks at them when the step is over."""

    when = ""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.retained: list[KeyedTensor] = []
        self.seen: list[Tensor] = []
        super().__init__(optimizer)
        self.retained.clear()
        self.seen.clear()

    def prepared(self, batch: Any, step: int) -> Any:
        features = KeyedJaggedTensor(["f", "g"], batch["values"], lengths=batch["lengths"])
        return features, KeyedJaggedTensor(
            ["f", "g"], batch["values"], lengths=batch["lengths"].flip(0)
        )

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        learning = self.ebc(batch[0])
        with torch.no_grad():
            self.retained.append(self.ebc(batch[1]))
        if self.when == "first":
            self.seen.append(self.retained[-1].values().clone())
        return learning.values()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.when == "batch end":
            self.seen.append(self.retained[-1].values().clone())

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.when == "end":
            self.seen = [retained.values().clone() for retained in self.retained]


def _touched(when: str) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    model_kind = type("Late", (TouchedLate,), {"when": when})
    model = model_kind("SGD")
    batches = [model.prepared(draw(step, rank_and_num_ranks()[0]), step) for step in range(STEPS)]
    model.losses.clear()
    make_trainer({"sharding_types": ["row_wise"]}).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return model.losses, model.final_state, model.seen


def test_rows_are_those_of_their_lookup_whenever_they_are_touched() -> None:
    times = ("first", "batch end", "end", "never")
    for rank_result in run_each_on_ranks({when: (_touched, when) for when in times}, 2):
        losses, state, seen = rank_result["first"]
        assert len(seen) == STEPS
        assert not any(
            torch.equal(first, other) for first, other in zip(seen, seen[1:], strict=False)
        )
        for when in times[1:]:
            assert rank_result[when][0] == losses, when
            assert all(torch.equal(state[key], rank_result[when][1][key]) for key in state), when
            assert len(rank_result[when][2]) == (0 if when == "never" else STEPS)
            for first, other in zip(seen, rank_result[when][2], strict=False):
                assert torch.equal(first, other), when


class BackwardsOrder(Bags):
    """Looks two batches of features up, and on one rank touches the second one's bags first."""

    on_rank = -1

    def prepared(self, batch: Any, step: int) -> Any:
        return {
            "one": KeyedJaggedTensor(["f", "g"], batch["values"], lengths=batch["lengths"]),
            "other": KeyedJaggedTensor(
                ["f", "g"], (batch["values"] + 1) % ROWS, lengths=batch["lengths"]
            ),
        }

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        bags, shifted_bags = self.ebc(batch["one"]), self.ebc(batch["other"])
        if rank_and_num_ranks()[0] == self.on_rank:
            second = shifted_bags.values()
            return bags.values() * second
        first = bags.values()
        return first * shifted_bags.values()


def _ordered(on_rank: int) -> tuple[list[float], dict[str, Tensor]]:
    kind = type("Ordered", (BackwardsOrder,), {"on_rank": on_rank})
    actual = fit(kind, 3, "Adam", {"sharding_types": ["table_wise"]})
    return actual["losses"], actual["state"]


def test_ranks_may_touch_rows_in_different_orders() -> None:
    for rank_result in run_each_on_ranks({"same": (_ordered, -1), "other": (_ordered, 1)}, 2):
        losses, state = rank_result["same"]
        assert rank_result["other"][0] == pytest.approx(losses, abs=1e-6)
        for name, value in rank_result["other"][1].items():
            assert torch.allclose(state[name], value, rtol=0, atol=1e-5), name

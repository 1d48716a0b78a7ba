"""The ways in which a LightningModule and its Trainer may run the loop keep their meaning over sharded tables."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import DistRecError
from tests.multiprocess.test_lifecycle import make_trainer
from tests.multiprocess.test_parity import limit_of
from tests.multiprocess.test_watches import LooksUpTwice, SkipsSteps
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    bag_configs,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
USUAL = ("SGD", "Adagrad", "Adam")
EVERY_CUT: dict[str, Any] = {
    "tables": {
        "wide": {"sharding_types": ["row_wise"]},
        "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
        "shared": {"sharding_types": ["data_parallel"]},
    }
}
STEPS = 7
State = dict[str, Tensor]
Batch = dict[str, Tensor]


def global_batches(steps: int = STEPS, first: int = 0) -> list[Batch]:
    """Return the joined batches of two ranks."""
    return [join_batches([make_batch(1000 * step + rank) for rank in range(2)]) for step in range(first, first + steps)]


def loss_of(model: ClickModel, batch: Batch) -> Tensor:
    """Return the loss without logging it."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])


def train_plain(
    model: ClickModel,
    batches: Iterable[Batch],
    clip: Callable[[Iterable[nn.Parameter]], Any] = lambda _: None,
    before_batch: Callable[[int], None] = lambda _: None,
) -> State:
    """Train `model` by a plain torch loop, one step for each batch; returns its state."""
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(batches):
        before_batch(index)
        optimizer.zero_grad()
        model.training_step(batch, index).backward()
        clip(model.parameters())
        optimizer.step()
    return model.state_dict()


def assert_equal(found: dict[str, State], wanted: Callable[[str], State], start: State | None = None) -> None:
    """Compare what was trained under each name of an optimizer with what `wanted` trains for it."""
    assert found
    for name, state in found.items():
        reference = wanted(name)
        differences = largest_difference(state, reference)
        assert max(differences.values()) <= limit_of(name), f"{name}: {differences}"
        moved = largest_difference(reference, start or seeded(ClickModel, *OPTIMIZERS["SGD"]).state_dict())
        assert min(moved.values()) > 1e-4, f"{name}: {moved}"


def _fit(
    kind: type, names: Iterable[str], strategy: dict[str, Any], options: dict[str, Any], steps: int = STEPS
) -> dict[str, State]:
    """Train a model of this kind on this rank with each optimizer in turn."""
    states = {}
    for name in names:
        model = seeded(kind, *OPTIMIZERS[name])
        make_trainer(strategy, **copy.deepcopy(options)).fit(model, rank_loader(steps, rank_and_num_ranks()[0]))
        states[name] = model.final_state
    return states


def train_accumulating(name: str, epochs: list[tuple[int, int]]) -> State:
    """Train plainly; epochs: of each, its batches and the batches for one step. The last step takes what is left."""
    model = seeded(ClickModel, *OPTIMIZERS[name])
    optimizer = model.configure_optimizers()
    for batches, accumulate in epochs:
        for index, batch in enumerate(global_batches(batches)):
            (loss_of(model, batch) / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == batches:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def test_accumulated_batches_make_one_step() -> None:
    found = run_on_ranks(_fit, 2, ClickModel, tuple(OPTIMIZERS), {}, {"accumulate_grad_batches": 3})[0]
    assert_equal(found, lambda name: train_accumulating(name, [(STEPS, 3)]))


def test_accumulation_that_a_scheduler_begins_later_is_exact() -> None:
    options = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
    found = run_on_ranks(_fit, 2, ClickModel, tuple(OPTIMIZERS), {}, options, 5)[0]
    assert_equal(found, lambda name: train_accumulating(name, [(5, 1), (5, 2)]))


class ManualModel(ClickModel):
    """Gives each batch to `recipe`, which does the rest."""

    recipe: Callable[..., None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        type(self).recipe(self, self.optimizers(), self.manual_backward, batch, batch_idx)


def accumulate(model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int) -> None:
    """Step at every third batch, after two backward passes for each."""
    for scale in (1.0, 0.3):
        backward(scale * loss_of(model, batch))
    if index % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


def discard(model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int) -> None:
    """Forget the gradients of a first backward, and of every third batch."""
    backward(5.0 * loss_of(model, batch))
    optimizer.zero_grad()
    backward(loss_of(model, batch))
    if index % 3 == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def pile_up(model: ClickModel, optimizer: Any, backward: Callable[[Tensor], None], batch: Batch, index: int) -> None:
    """Never forget a gradient."""
    backward(0.1 * loss_of(model, batch))
    optimizer.step()


class Accumulates(ManualModel):
    """Accumulates by hand."""

    recipe = accumulate


class Discards(ManualModel):
    """Calls zero_grad before step."""

    recipe = discard


class PilesUp(ManualModel):
    """Calls no zero_grad."""

    recipe = pile_up


MANUAL = (Accumulates, Discards, PilesUp)


def _manual() -> list[dict[str, State]]:
    return [_fit(kind, tuple(OPTIMIZERS), {}, {}) for kind in MANUAL]


def test_manual_optimization_decides_when_gradients_are_used_and_forgotten() -> None:
    for kind, found in zip(MANUAL, run_on_ranks(_manual, 2)[0], strict=True):

        def plain(name: str, kind: type[ManualModel] = kind) -> State:
            model = seeded(ClickModel, *OPTIMIZERS[name])
            optimizer = model.configure_optimizers()
            for index, batch in enumerate(global_batches()):
                kind.recipe(model, optimizer, Tensor.backward, batch, index)
            return model.state_dict()

        assert_equal(found, plain)


class Toggles(ClickModel):
    """Two optimizers that take turns, as in Lightning's documentation of GANs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.optimizer(part.parameters(), **self.options) for part in (self.ebc, self.mlp)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for scale, optimizer in zip((1.0, 3.0), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(scale * loss_of(self, batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class TogglesOneTable(Toggles):
    """The same with one table, so that a rank may have no row of any."""

    def _build(self) -> None:
        self.ebc = EmbeddingBagCollection(tables=bag_configs()[:1])
        self.first = nn.Linear(32, 56, bias=False).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.first(self.ebc(features).values())).squeeze(-1)


def train_toggling(kind: type[Toggles], name: str) -> State:
    """Train the tables and the rest in turn, by a plain loop."""
    model = seeded(kind, *OPTIMIZERS[name])
    optimizers = model.configure_optimizers()
    for batch in global_batches():
        for scale, optimizer in zip((1.0, 3.0), optimizers, strict=True):
            (scale * loss_of(model, batch)).backward()
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
@pytest.mark.parametrize("kind", [Toggles, TogglesOneTable])
def test_optimizers_that_are_toggled_update_their_own_parameters_only(kind: type[Toggles], cut: str) -> None:
    strategy = {"find_unused_parameters": True, "sharding_types": [cut]}  # what DDP needs for dense layers
    found = run_on_ranks(_fit, 2, kind, USUAL, strategy, {}, timeout_seconds=25)[0]
    assert_equal(found, lambda name: train_toggling(kind, name), seeded(kind, *OPTIMIZERS["SGD"]).state_dict())


def _toggled_over_fused_tables() -> tuple[dict[str, State], str]:
    try:
        return _fit(Toggles, ("SGD",), {"find_unused_parameters": True, "embedding_update": "fused"}, {}), ""
    except DistRecError as refused:
        return {}, str(refused)


def test_fused_tables_rest_while_another_optimizer_is_toggled_or_are_refused() -> None:
    for found, refused in run_on_ranks(_toggled_over_fused_tables, 2):
        if refused:
            assert re.search("table 'ebc.wide' .*embedding_update='(auto|sparse)'", refused)
        else:
            assert_equal(found, lambda name: train_toggling(Toggles, name))


class FreezesTables(ClickModel):
    """Freezes its tables for two batches in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.freeze_or_not(batch_idx)

    def freeze_or_not(self, index: int) -> None:
        if index in (2, 4):
            self.ebc.requires_grad_(index == 4)


class FreezesOneTable(FreezesTables):
    """The same with one of them."""

    def freeze_or_not(self, index: int) -> None:
        if index in (2, 4):
            self.ebc.embedding_bags["wide"].requires_grad_(index == 4)


FREEZING: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"embedding_update": "sparse"}),
    ("SGD", {"embedding_update": "dense"}),
    ("SGD", {"sharding_types": ["table_wise"]}),
    ("SGD", {"sharding_types": ["column_wise"]}),
    ("Adagrad", {}),
    ("Adagrad", {"embedding_update": "sparse", "sharding_types": ["table_wise"]}),
    ("RowWiseAdagrad", {}),
    ("Adam", {}),
]


def _frozen_in_the_middle(kind: type) -> list[dict[str, State]]:
    return [_fit(kind, (name,), strategy, {}) for name, strategy in FREEZING]


@pytest.mark.parametrize("kind", [FreezesTables, FreezesOneTable])
def test_tables_rest_while_they_are_frozen_and_learn_on_afterwards(kind: type[FreezesTables]) -> None:
    def plain(name: str) -> State:
        model = seeded(kind, *OPTIMIZERS[name])
        return train_plain(model, global_batches(), before_batch=model.freeze_or_not)

    for found in run_on_ranks(_frozen_in_the_middle, 2, kind)[0]:
        assert_equal(found, plain)


def test_tables_that_every_rank_holds_whole_can_be_frozen_too() -> None:
    def plain(name: str) -> State:
        model = seeded(FreezesTables, *OPTIMIZERS[name])
        return train_plain(model, global_batches(), before_batch=model.freeze_or_not)

    assert_equal(run_on_ranks(_fit, 2, FreezesTables, USUAL, EVERY_CUT, {})[0], plain)


class Tower(pl.LightningModule):
    """Tables in a LightningModule of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=bag_configs())

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.tables(features)


class FreezesTower(FreezesTables):
    """Calls freeze and unfreeze of the inner LightningModule."""

    def _build(self) -> None:
        self.ebc = Tower()

    def freeze_or_not(self, index: int) -> None:
        if index == 2:
            self.ebc.freeze()
        if index == 4:
            self.ebc.unfreeze()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)


def _freeze_and_unfreeze() -> tuple[dict[str, State], Tensor]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        model = seeded(FreezesTower, *OPTIMIZERS[name])
        model.freeze()
        predicted = make_trainer().predict(model, rank_loader(1, rank))[0]
        model.unfreeze()
        make_trainer().fit(model, rank_loader(STEPS, rank))
        states[name] = model.final_state
    return states, predicted


def test_freeze_and_unfreeze_of_a_lightning_module_reach_its_tables() -> None:
    found, predicted = run_on_ranks(_freeze_and_unfreeze, 2)[0]
    start = seeded(FreezesTower, *OPTIMIZERS["SGD"])

    def plain(name: str) -> State:
        model = seeded(FreezesTower, *OPTIMIZERS[name])
        return train_plain(model, global_batches(), before_batch=model.freeze_or_not)

    torch.testing.assert_close(predicted, start(make_batch(0)).detach(), atol=1e-6, rtol=0)
    assert_equal(found, plain, start.state_dict())


CLIPPING: dict[str, tuple[float, Callable[..., Any]]] = {
    "norm": (0.05, clip_grad_norm_),
    "value": (0.002, clip_grad_value_),
}


class ClipsByHand(ManualModel):
    """Clips in manual optimization."""

    algorithm = "norm"

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self, batch))
        self.clip_gradients(optimizer, CLIPPING[self.algorithm][0], self.algorithm)
        optimizer.step()


class ClipsByHandByValue(ClipsByHand):
    """The same by value."""

    algorithm = "value"


class ClipsInItsHook(ClickModel):
    """Clips by itself, without a word to the Trainer or with what the Trainer was told."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        limit = CLIPPING["norm"][0] if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, limit, gradient_clip_algorithm or "norm")


def _clipped(algorithm: str) -> list[dict[str, State]]:
    by_trainer = {"gradient_clip_val": CLIPPING[algorithm][0], "gradient_clip_algorithm": algorithm}
    return [
        _fit(ClickModel, USUAL, {}, by_trainer),
        _fit(ClipsByHand if algorithm == "norm" else ClipsByHandByValue, USUAL, EVERY_CUT, {}),
        _fit(ClipsInItsHook, USUAL, EVERY_CUT, {} if algorithm == "norm" else by_trainer),
    ]


@pytest.mark.parametrize("algorithm", CLIPPING)
def test_gradients_are_clipped_as_those_of_whole_tables(algorithm: str) -> None:
    limit, clip = CLIPPING[algorithm]

    def plain(name: str) -> State:
        clipped = train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches(), lambda p: clip(p, limit))
        free = train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches())
        # Adagrad and Adam divide by the size of gradients: the limit must matter to them too.
        assert min(largest_difference(clipped, free).values()) > 10 * limit_of(name)
        return clipped

    for found in run_on_ranks(_clipped, 2, algorithm)[0]:
        assert_equal(found, plain)


def _looked_up_twice() -> list[dict[str, State]]:
    return [
        _fit(LooksUpTwice, ("Adagrad",), {"embedding_update": "sparse"}, {}),
        _fit(LooksUpTwice, ("Adagrad", "RowWiseAdagrad"), {"embedding_update": "dense"}, {}),
    ]


def test_gradients_of_several_lookups_make_one_update() -> None:
    for found in run_on_ranks(_looked_up_twice, 2)[0]:
        assert_equal(found, lambda name: train_plain(seeded(LooksUpTwice, *OPTIMIZERS[name]), global_batches()))


def test_an_optimizer_step_that_steps_at_every_second_batch_is_exact() -> None:
    found = run_on_ranks(_fit, 2, SkipsSteps, tuple(OPTIMIZERS), {}, {})[0]

    def plain(name: str) -> State:
        model = seeded(ClickModel, *OPTIMIZERS[name])
        optimizer = model.configure_optimizers()
        for index, batch in enumerate(global_batches()):
            if index % 2 == 0:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            if index % 2:
                optimizer.step()
        return model.state_dict()

    assert_equal(found, plain)


class TwoLoaders(ClickModel):
    """Takes a batch of each of two loaders."""

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        return loss_of(self, batch["one"]) + 0.5 * loss_of(self, batch["other"])


def _combined(mode: str) -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        model = seeded(TwoLoaders, *OPTIMIZERS[name])
        loaders = {"one": rank_loader(5, rank), "other": rank_loader(3, rank, first=50)}
        update = "sparse" if name == "Adagrad" else "auto"
        make_trainer({"embedding_update": update}).fit(model, CombinedLoader(loaders, mode))
        states[name] = model.final_state
    return states


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_combined_loaders_give_each_step_a_batch_of_each(mode: str) -> None:
    found = run_on_ranks(_combined, 2, mode)[0]
    pairs = list(zip(global_batches(5), cycle(global_batches(3, first=50)), strict=False))
    batches: Any = [{"one": one, "other": other} for one, other in pairs[: 5 if mode == "max_size_cycle" else 3]]
    assert_equal(found, lambda name: train_plain(seeded(TwoLoaders, *OPTIMIZERS[name]), batches))


class TakesIterator(ClickModel):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_training_step_that_fetches_its_batches_is_exact() -> None:
    found = run_on_ranks(_fit, 2, TakesIterator, USUAL, {}, {})[0]
    assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches()))


class ChangesLoader(ClickModel):
    """Has other batches in every epoch, and on rank 1 one more of them than on rank 0."""

    def train_dataloader(self) -> DataLoader:
        rank, _ = rank_and_num_ranks()
        epoch = self.trainer.current_epoch
        return rank_loader(2 + epoch + rank, rank, first=10 * epoch)


def _reloaded() -> dict[str, State]:
    states = {}
    for name in USUAL:
        model = seeded(ChangesLoader, *OPTIMIZERS[name])
        make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
        states[name] = model.final_state
    return states


def test_every_epoch_may_have_a_loader_of_its_own() -> None:
    batches = [batch for epoch in range(3) for batch in global_batches(2 + epoch, first=10 * epoch)]
    found = run_on_ranks(_reloaded, 2)[0]
    assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), batches))


def test_overfit_batches_repeats_the_first_batches() -> None:
    found = run_on_ranks(_fit, 2, ClickModel, USUAL, {}, {"overfit_batches": 2, "max_epochs": 3})[0]
    assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), 3 * global_batches(2)))


def _with_anomaly_detection() -> list[dict[str, State]]:
    cases: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (USUAL, {}),
        (("Adagrad",), {"embedding_update": "sparse"}),
        (("SGD",), EVERY_CUT),
    ]
    return [_fit(ClickModel, names, strategy, {"detect_anomaly": True}) for names, strategy in cases]


def test_anomaly_detection_changes_no_number() -> None:
    for found in run_on_ranks(_with_anomaly_detection, 2)[0]:
        assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches()))


class NaNGradient(torch.autograd.Function):
    """Hands on its input, and a NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


class GoesWrong(ClickModel):
    """Has a NaN in its backward."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return NaNGradient.apply(super().training_step(batch, batch_idx))


def test_anomaly_detection_finds_a_gradient_that_is_not_a_number() -> None:
    with pytest.raises(RankFailed, match="Function 'NaNGradientBackward' returned nan values"):
        run_on_ranks(_fit, 2, GoesWrong, ("SGD",), {}, {"detect_anomaly": True})


class CompiledDense(ClickModel):
    """Compiles its dense layers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mlp = torch.compile(self.mlp, backend="aot_eager")


def _compiled_dense() -> dict[str, State]:
    states = _fit(CompiledDense, ("SGD", "Adam"), {}, {})
    return {
        name: {key.replace("_orig_mod.", ""): value for key, value in state.items()} for name, state in states.items()
    }


def test_compiled_dense_layers_are_exact() -> None:
    found = run_on_ranks(_compiled_dense, 2)[0]
    assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches()))


class WithoutLogging(ClickModel):
    """Logs nothing: Lightning's own `log` cannot be compiled by every torch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self, batch)


def _compiled_module() -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in ("SGD", "Adam"):
        model = seeded(WithoutLogging, *OPTIMIZERS[name])
        make_trainer().fit(torch.compile(model, backend="aot_eager"), rank_loader(STEPS, rank))
        states[name] = model.final_state
    return states


def test_a_compiled_lightning_module_is_exact() -> None:
    found = run_on_ranks(_compiled_module, 2)[0]
    assert_equal(found, lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), global_batches()))

"""A run that goes on from a checkpoint, on any ranks and any plan, is the run that never
stopped."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import save_file
from torch import Tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.click_model import join_batches, seeded
from tests.support.parameters import slow_except
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.resuming import (
    GLOBAL_BATCH,
    Clicks,
    Counts,
    Examples,
    Frozen,
    Grouped,
    GroupedInSteps,
    Grown,
    LearnsInPart,
    Life,
    Lived,
    NamedTwice,
    Narrower,
    OnPlateau,
    Outcome,
    PlainTables,
    Random,
    Renamed,
    RenamedLoosely,
    Run,
    Sequences,
    Shorter,
    Tower,
    Twice,
    TwoOptimizers,
    Unfreezes,
    differences,
    live,
    loader,
    problems_of,
    train,
    train_each,
)
from tests.support.trainers import make_trainer

TW, RW, CW, TWRW, DP = CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "data_parallel",
)
UPDATES = ("fused", "sparse", "dense")
TABLES = ("wide", "narrow", "shared")

SGD = (torch.optim.SGD, {"lr": 0.5})
MOMENTUM = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05})
FROM_A_VALUE = (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1})
ROW_WISE = (RowWiseAdagrad, {"lr": 0.05})
ADAM = (torch.optim.Adam, {"lr": 0.01})
SPARSE_ADAM = (torch.optim.SparseAdam, {"lr": 0.01})
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


def plan(*cuts: str, update: str | tuple[str, ...] = "auto", **extra: Any) -> dict[str, Any]:
    """Return the strategy's options for the three tables; one cut, or one update, is for all of
    them."""
    updates = (update,) * 3 if isinstance(update, str) else update
    tables: dict[str, Any] = {}
    for name, cut, mode in zip(TABLES, cuts if len(cuts) == 3 else cuts * 3, updates, strict=True):
        tables[name] = {"sharding_types": [cut], "embedding_update": "dense" if cut == DP else mode}
        if "column" in cut:
            tables[name]["min_partition"] = 4
    return {"tables": tables, **extra}


def turned(number: int, shift: int = 0) -> dict[str, Any]:
    """Return one plan of many, in which no two tables are cut alike."""
    cuts = [CUTS[(number + t + shift) % len(CUTS)] for t in range(3)]
    return plan(
        *cuts, update=tuple(UPDATES[(number + t + 2 * shift) % len(UPDATES)] for t in range(3))
    )


def from_each(num_ranks: int) -> Life:
    """Return a life on so many ranks that goes on with the same plan there, and with others
    everywhere."""
    later = [(w, {"strategy": turned(num_ranks, 1 + (num_ranks + w) % 4)}) for w in (1, 2, 3, 4)]
    return Life(Run(strategy=turned(num_ranks)), num_ranks, ((num_ranks, {}), *later))


MIXED = plan(TW, RW, CW)
ALIKE = (2, {})
ONE = (1, {"strategy": plan(RW, CW, TW, update="sparse")})
ONE_DENSE = (1, {"strategy": plan(CW, TWRW, RW, update="dense")})
THREE = (3, {"strategy": plan(CW, TWRW, RW, update="dense")})

PLANS = {f"from {num_ranks}": from_each(num_ranks) for num_ranks in (1, 2, 3, 4)}

OPTIMIZERS = {
    "SGD": Life(Run(optimizer=SGD, strategy=MIXED), 2, (ALIKE, ONE, THREE)),
    "momentum": Life(
        Run(optimizer=MOMENTUM, strategy=plan(DP, CW, RW)), 2, (ALIKE, (1, {"strategy": MIXED}))
    ),
    "Adagrad from a value": Life(
        Run(optimizer=FROM_A_VALUE, strategy=MIXED), 2, (ALIKE, ONE, THREE)
    ),
    "RowWiseAdagrad": Life(
        Run(optimizer=ROW_WISE, strategy=plan(TW, RW, TWRW)),
        2,
        (
            ALIKE,
            (1, {"strategy": plan(RW, TWRW, TW, update="dense")}),
            (3, {"strategy": plan(TWRW, TW, RW)}),
            (2, {"strategy": plan(DP, DP, RW)}),
        ),
    ),
    "RowWiseAdagrad, dense": Life(
        Run(optimizer=ROW_WISE, strategy=plan(DP, TWRW, RW, update="dense")),
        2,
        (ALIKE, (1, {"strategy": plan(TW)})),
    ),
    "Adam": Life(
        Run(optimizer=ADAM, strategy=MIXED),
        2,
        (
            ALIKE,
            (1, {"strategy": plan(CW, DP, RW)}),
            (3, {"strategy": plan(RW, TWRW, DP)}),
            (4, {"strategy": plan(CW)}),
        ),
    ),
    "AdamW": Life(
        Run(optimizer=ADAMW, strategy=plan(CW)), 2, (ALIKE, (1, {"strategy": plan(CW, RW, DP)}))
    ),
    "groups": Life(Run(model=Grouped, strategy=MIXED), 2, (ALIKE, ONE, THREE)),
    "groups and rates in steps": Life(Run(model=GroupedInSteps, strategy=MIXED), 2, (ALIKE, ONE)),
    "two by hand": Life(Run(model=TwoOptimizers, strategy=MIXED), 2, (ALIKE, ONE, THREE)),
    "two by hand, SparseAdam": Life(
        Run(model=TwoOptimizers, optimizer=SPARSE_ADAM, strategy=plan(TW, RW, CW, update="sparse")),
        2,
        (ALIKE, ONE),
    ),
    "two by hand, momentum": Life(
        Run(model=TwoOptimizers, optimizer=MOMENTUM), 2, (ALIKE, (1, {"strategy": plan(CW)}))
    ),
}

ALL = {"convert_embeddings": "all"}
PLAIN = {
    **ALL,
    "tables": {
        "bags.wide": {"sharding_types": [RW]},
        "shared": {"sharding_types": [CW], "min_partition": 4},
    },
}
MODULES = {
    "EmbeddingCollection": Life(
        Run(model=Sequences, strategy={"sharding_types": [RW]}),
        2,
        (
            ALIKE,
            (1, {"strategy": {"sharding_types": [CW]}}),
            (2, {"strategy": {"embedding_update": "dense"}}),
        ),
    ),
    "nn.Embedding": Life(
        Run(model=PlainTables, strategy=PLAIN),
        2,
        (ALIKE, (1, {"strategy": ALL}), (2, {"strategy": {"convert_embeddings": "none"}})),
    ),
    "nn.Embedding, whole": Life(
        Run(model=PlainTables, optimizer=ADAM), 2, (ALIKE, (1, {"strategy": PLAIN}))
    ),
    "mean pooling": Life(
        Run(model_options={"pooling": "mean"}, strategy=MIXED), 2, (ALIKE, ONE_DENSE)
    ),
    "weights": Life(
        Run(model_options={"weighted": True}, optimizer=ADAM, strategy=MIXED), 2, (ALIKE, ONE_DENSE)
    ),
    "frozen": Life(Run(model=Frozen, strategy=MIXED), 2, (ALIKE, ONE)),
    "frozen, Adam": Life(Run(model=Frozen, optimizer=ADAM, strategy=MIXED), 2, (ALIKE, (1, {}))),
    "looked up twice": Life(
        Run(model=Twice, strategy=MIXED),
        2,
        (ALIKE, ONE_DENSE, (3, {"strategy": plan(RW, CW, TW, update="sparse")})),
    ),
    "looked up twice, RowWiseAdagrad": Life(
        Run(model=Twice, optimizer=ROW_WISE, save=("on_train_batch_end", 8)),
        2,
        (ALIKE, (3, {"strategy": plan(RW, TWRW, TW)})),
    ),
    "two names": Life(Run(model=NamedTwice, strategy=MIXED), 2, (ALIKE, ONE_DENSE)),
    "built on meta": Life(Run(model_options={"meta": True}, strategy=MIXED), 2, (ALIKE, ONE_DENSE)),
}


def scaled() -> dict[str, Any]:
    """A scale that grows every third step, and has counted to 2 when the run is saved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def stops_early() -> dict[str, Any]:
    """Its patience ends one epoch after the run is saved."""
    return {"callbacks": [EarlyStopping("val_loss", patience=2, min_delta=10.0)]}


def averaged() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.9)]}


def averaged_late() -> dict[str, Any]:
    return {
        "callbacks": [
            StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)
        ]
    }


def unfrozen() -> dict[str, Any]:
    return {"callbacks": [Unfreezes(epoch=2)]}


MIDDLE = ("on_train_batch_end", 8)
VALIDATED = ("on_validation_end", 10)
LATER = ("on_train_epoch_end", 15)
RANDOM = Run(model=Random, model_options={"start": 5})
OTHER_START = {"model_options": {"start": 99}}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
CLIPPED_BY_VALUE = {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.005}
LOOPS = {
    "middle of an epoch": Life(Run(save=MIDDLE, strategy=MIXED), 2, (ALIKE, ONE, THREE)),
    "middle, written behind the steps": Life(
        Run(save=MIDDLE, optimizer=ADAM, strategy={**MIXED, "checkpoint": {"async_save": True}}),
        2,
        (ALIKE, ONE_DENSE),
    ),
    "middle, not shuffled": Life(Run(save=MIDDLE, shuffle=False), 2, (ALIKE, (1, {}))),
    "last batch": Life(Run(save=("on_train_batch_end", 10), strategy=MIXED), 2, (ALIKE, ONE)),
    "validated": Life(Run(save=VALIDATED, validates=True, strategy=MIXED), 2, (ALIKE, ONE)),
    "validated in the middle": Life(
        Run(save=("on_validation_end", 9), validates=True, trainer={"val_check_interval": 2}),
        2,
        (ALIKE, (1, {})),
    ),
    "end of an epoch, validated": Life(
        Run(save=("on_train_epoch_end", 10), validates=True, epochs=4), 2, (ALIKE, (1, {}))
    ),
    "accumulation and clipping": Life(Run(trainer=CLIPPED), 2, (ALIKE, ONE)),
    "clipping by value, middle": Life(
        Run(trainer=CLIPPED_BY_VALUE, optimizer=ADAM, save=MIDDLE), 2, (ALIKE, (1, {}))
    ),
    # Sums in 16 bits are other ones where batches are shared out in another way.
    "bf16-mixed": Life(Run(trainer={"precision": "bf16-mixed"}), 2, (ALIKE, (1, {})), limit=2e-2),
    "16-mixed": Life(Run(extra=scaled, optimizer=SGD), 2, (ALIKE, (1, {})), limit=2e-2),
    "stops early": Life(
        Run(extra=stops_early, validates=True, epochs=9, save=("on_train_epoch_end", 10)),
        2,
        (ALIKE, (1, {})),
    ),
    "unfrozen later": Life(Run(model=LearnsInPart, extra=unfrozen), 2, (ALIKE, ONE_DENSE)),
    "random": Life(RANDOM, 2, ((2, OTHER_START),)),
    "random, middle": Life(Run(**vars(RANDOM) | {"save": MIDDLE}), 2, ((2, OTHER_START),)),
    "random, validated": Life(
        Run(**vars(RANDOM) | {"save": VALIDATED, "validates": True, "epochs": 4}),
        2,
        ((2, OTHER_START),),
    ),
    "random, middle, validated": Life(
        Run(**vars(RANDOM) | {"save": MIDDLE, "validates": True, "epochs": 4}),
        1,
        ((1, OTHER_START),),
    ),
    "moving average": Life(Run(extra=averaged, strategy=MIXED), 2, (ALIKE, ONE_DENSE)),
    "moving average, middle": Life(
        Run(extra=averaged, strategy=MIXED, save=MIDDLE, optimizer=ADAM), 2, (ALIKE, ONE_DENSE)
    ),
    "stochastic average, before": Life(
        Run(extra=averaged_late, strategy=MIXED), 2, (ALIKE, ONE_DENSE)
    ),
    "stochastic average, within": Life(
        Run(extra=averaged_late, strategy=MIXED, save=LATER), 2, (ALIKE, ONE_DENSE)
    ),
}

# Not shuffled: Lightning's own strategy for one device draws another order.
ONE_FILE = {"checkpoint": {"distributed": False}}
STOCK = (1, {"strategy": None})
FILES = {
    "one file, Adagrad": Life(
        Run(shuffle=False, strategy={**MIXED, **ONE_FILE}),
        2,
        (ALIKE, (3, {"strategy": plan(RW, DP, TW)}), STOCK),
    ),
    "one file, Adam": Life(
        Run(shuffle=False, optimizer=ADAM, strategy={**plan(RW), **ONE_FILE}),
        2,
        (ALIKE, (1, {"strategy": plan(CW, **ONE_FILE)}), STOCK),
    ),
    "stock, Adagrad": Life(
        Run(shuffle=False, strategy=None),
        1,
        (STOCK, (2, {"strategy": plan(CW, TW, RW, update="fused")})),
    ),
    "stock, RowWiseAdagrad": Life(
        Run(shuffle=False, strategy=None, optimizer=ROW_WISE),
        1,
        (
            (1, {"strategy": plan(DP, TWRW, RW)}),
            (2, {"strategy": plan(TW, RW, TWRW, update="fused")}),
        ),
    ),
    "stock, Adam": Life(
        Run(shuffle=False, strategy=None, optimizer=ADAM),
        1,
        (
            (1, {"strategy": plan(CW)}),
            (2, {"strategy": plan(CW, RW, DP)}),
            (3, {"strategy": MIXED}),
        ),
    ),
}
ON_PLATEAU = Run(model=OnPlateau, shuffle=False, validates=True, save=("on_train_batch_end", 13))
PLATEAUS = {
    "sharded": Life(ON_PLATEAU, 2, (ALIKE, (1, {}))),
    "stock": Life(replace(ON_PLATEAU, strategy=None), 1, (STOCK,)),
}


GROUPS = {
    "plans": PLANS,
    "optimizers": OPTIMIZERS,
    "modules": MODULES,
    "loops": LOOPS,
    "files": FILES | PLATEAUS,
}
USUAL = {
    "plans": ["from 2"],
    "optimizers": ["Adam", "groups and rates in steps"],
    "modules": ["nn.Embedding"],
    "loops": [
        "middle of an epoch",
        "middle, written behind the steps",
        "16-mixed",
        "moving average, middle",
    ],
    "files": ["one file, Adagrad", "stock, RowWiseAdagrad"],
}


@cache
def lived(group: str, usual: bool = True) -> dict[str, Lived]:
    """Return what became of the usual lives of a group, or of the others. The same ranks live them
    one by one."""
    return live({
        name: life for name, life in GROUPS[group].items() if (name in USUAL[group]) is usual
    })


def problems(group: str, name: str) -> list[str]:
    """Return what is wrong with a life."""
    return problems_of(GROUPS[group][name], lived(group, name in USUAL[group])[name])


@pytest.mark.parametrize("name", slow_except(USUAL["plans"], PLANS))
def test_any_number_of_ranks_goes_on_with_any_plan(name: str) -> None:
    assert problems("plans", name) == []


@pytest.mark.slow
def test_every_sharding_type_and_update_was_followed_by_every_other() -> None:
    cuts, updates = set(), set()
    for life in (lived("plans") | lived("plans", usual=False)).values():
        for later in life.later:
            for table, old in life.first[0].plan.items():
                (cut, update), (next_cut, next_update) = old.split(), later[0].plan[table].split()
                cuts.add((cut, next_cut))
                updates.add((update, next_update))
    assert cuts == set(product(CUTS, repeat=2))
    assert updates == set(product(UPDATES, repeat=2))


@pytest.mark.parametrize("name", slow_except(USUAL["optimizers"], OPTIMIZERS))
def test_optimizers_go_on_with_their_state(name: str) -> None:
    assert problems("optimizers", name) == []


@pytest.mark.parametrize("name", slow_except(USUAL["modules"], MODULES))
def test_modules_of_every_kind_go_on(name: str) -> None:
    assert problems("modules", name) == []


@pytest.mark.parametrize("name", slow_except(USUAL["loops"], LOOPS))
def test_loops_go_on_where_they_were(name: str) -> None:
    assert problems("loops", name) == []


@pytest.mark.parametrize(
    "name", slow_except([name for name in USUAL["files"] if name in FILES], FILES)
)
def test_plain_files_go_on_sharded_and_under_lightnings_own_strategy(name: str) -> None:
    assert problems("files", name) == []


@pytest.mark.slow
def test_a_plateau_goes_on_as_if_the_run_had_never_stopped() -> None:
    assert problems("files", "sharded") == []
    # Lightning's own strategy leaves out the epoch in which a run goes on.
    stock = lived("files", usual=False)["stock"]
    assert len({tuple(rates) for rates in stock.later[0][0].rates}) == 2


def test_one_file_is_a_checkpoint_that_the_users_own_module_loads(forms: dict[str, str]) -> None:
    for form, has_optimizers in (("one file", True), ("weights in a file", False)):
        actual = torch.load(forms[form], weights_only=True)
        assert ("optimizer_states" in actual) is has_optimizers
        model = Clicks(*FROM_A_VALUE)
        model.load_state_dict(actual["state_dict"], strict=True)
        expected = plain_checkpoint(forms["folder"])["state_dict"]
        assert differences(dict(model.state_dict()), dict(expected), "state_dict", 0.0) == []
        if has_optimizers:
            model.configure_optimizers().load_state_dict(actual["optimizer_states"][0])


def test_differences_are_reported() -> None:
    life, run = Life(Run(), 1, ((1, {}),)), Outcome(losses=[2.0] * 25, rates=[[0.1]] * 25)
    run.final = {"state_dict": {"w": torch.ones(2)}, "optimizer_states": []}
    later = Outcome(losses=[2.0] * 19 + [2.0001], rates=[[0.1]] * 20)
    later.final = {"state_dict": {"w": torch.tensor([1.0, 1.5])}, "optimizer_states": []}
    assert [
        message.partition(": ")[2] for message in problems_of(life, Lived([run], [[later]]))
    ] == [
        "losses/19 is 2.0001, not 2.0",
        "final/state_dict/w is off by 0.5",
        "of ranks/0/19 is 2.0001, not 2.0",
    ]
    failed = Outcome(failed="E: it", trace="in a file\nE: it")
    assert problems_of(life, Lived([run], [[failed]])) == [
        "1 to 1 ranks, nothing else: rank 0: in a file\nE: it"
    ]
    assert differences({"a": [1, 2.0]}, {"a": [1, 2.5]}, "x", 0.1) == ["x/a/1 is 2.0, not 2.5"]
    assert differences([torch.ones(2)], [torch.ones(3)], "x", 0.1)


# ---- the words "last" and "best", checkpoints saved by hand, evaluation


def _fit(
    max_epochs: int, folder: str, ckpt_path: str | None = None, save_last: Any = True
) -> tuple[list[float], Any]:
    """Collective. Return the losses of a run with a checkpoint after each epoch, and its
    trainer."""
    keep = ModelCheckpoint(folder, "{epoch}", monitor="epochs", save_top_k=-1, save_last=save_last)
    options = {
        "max_epochs": max_epochs,
        "use_distributed_sampler": True,
        "enable_checkpointing": True,
    }
    model, trainer = seeded(Counts, *ADAGRAD), make_trainer(MIXED, callbacks=[keep], **options)
    trainer.fit(model, loader(rank_and_num_ranks()[1]), ckpt_path=ckpt_path)
    return model.losses, trainer


def _by_words(folder: str) -> dict[str, list[float]]:
    num_ranks = rank_and_num_ranks()[1]
    actual = {"never stopped": _fit(4, f"{folder}/whole")[0]}
    _, trainer = _fit(2, f"{folder}/part")
    trainer.save_checkpoint(f"{folder}/by hand.ckpt")
    actual["last"] = _fit(4, f"{folder}/part", "last")[0]
    _fit(2, f"{folder}/linked", save_last="link")
    actual["last, linked"] = _fit(4, f"{folder}/linked", "last", "link")[0]
    actual["by hand"] = _fit(4, f"{folder}/elsewhere", f"{folder}/by hand.ckpt")[0]
    actual["at its end"] = _fit(2, f"{folder}/elsewhere", f"{folder}/by hand.ckpt")[0]
    trainer.fit_loop.max_epochs = 4
    model = trainer.lightning_module  # its tables are sharded since the fit before
    model.losses = []
    trainer.fit(model, loader(num_ranks), ckpt_path="best")  # that of the first epoch
    actual["best"] = model.losses
    return actual


def test_last_and_best_and_checkpoints_saved_by_hand_go_on(tmp_path: Path) -> None:
    for actual in run_on_warm_ranks(_by_words, 2, str(tmp_path)):
        whole = actual["never stopped"]
        assert len(whole) == 20
        assert actual["last"] == actual["last, linked"] == actual["by hand"] == whole[10:]
        assert actual["best"] == whole[5:]
        assert actual["at its end"] == []


def _evaluated(path: str) -> tuple[float, float, list[Tensor]]:
    batches = loader(rank_and_num_ranks()[1], shuffle=False, steps=2, first=10_000)
    model, trainer = seeded(Clicks, *ADAGRAD), make_trainer(MIXED, use_distributed_sampler=True)
    tested = trainer.test(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"]
    validated = trainer.validate(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"]
    predicted = trainer.predict(model, batches, ckpt_path=path)
    return tested, validated, predicted


@pytest.mark.parametrize("weights_only", slow_except([False], [False, True]))
def test_a_folder_is_evaluated_on_any_number_of_ranks(tmp_path: Path, weights_only: bool) -> None:
    path = str(tmp_path / "saved.ckpt")
    run_on_warm_ranks(_save, 2, path, weights_only)
    model = Clicks(*ADAGRAD)
    model.load_state_dict(plain_checkpoint(path)["state_dict"])
    examples = Examples(2 * GLOBAL_BATCH, 10_000).examples
    with torch.no_grad():
        expected = model(join_batches(examples))
        labels = torch.cat([example["label"] for example in examples])
        loss = float(torch.nn.functional.binary_cross_entropy_with_logits(expected, labels))
    for num_ranks in (1, 3):
        actual = run_on_warm_ranks(_evaluated, num_ranks, path)
        for rank, (tested, validated, predicted) in enumerate(actual):
            assert tested == pytest.approx(loss, abs=1e-6)
            assert validated == pytest.approx(loss, abs=1e-6)
            assert float((torch.cat(predicted) - expected[rank::num_ranks]).abs().max()) <= 1e-6


def _save(path: str, weights_only: bool) -> None:
    model, trainer = seeded(Clicks, *ADAGRAD), make_trainer(MIXED, use_distributed_sampler=True)
    trainer.fit(model, loader(rank_and_num_ranks()[1]))
    trainer.save_checkpoint(path, weights_only)


# ---- new runs that start from weights


BEGINS = Run(optimizer=FROM_A_VALUE, save=("on_train_start", 0), epochs=1)
TOWER = {"ebc": "tower.tables", "mlp": "tower.mlp"}


def _save_forms(folder: str) -> None:
    in_one_file = {**MIXED, **ONE_FILE}
    for name, strategy, weights_only in (
        ("weights of a folder", MIXED, True),
        ("one file", in_one_file, False),
        ("weights in a file", in_one_file, True),
    ):
        model, trainer = (
            seeded(Clicks, *FROM_A_VALUE),
            make_trainer(strategy, use_distributed_sampler=True),
        )
        trainer.fit(model, loader(2))
        trainer.save_checkpoint(f"{folder}/{name}", weights_only)
    train(Run(strategy=MIXED, optimizer=FROM_A_VALUE, epochs=1), f"{folder}/folder")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of weights in every form."""
    folder = tmp_path_factory.mktemp("forms")
    run_on_warm_ranks(_save_forms, 2, str(folder))
    run_on_warm_ranks(
        train, 1, Run(strategy=None, optimizer=FROM_A_VALUE, epochs=1), str(folder / "stock")
    )
    state = plain_checkpoint(folder / "folder" / "saved.ckpt")["state_dict"]
    torch.save(state, folder / "bare.pt")
    save_file(state, folder / "bare.safetensors")
    names = ("weights of a folder", "one file", "weights in a file", "bare.pt", "bare.safetensors")
    actual = {name: str(folder / name) for name in names}
    return actual | {name: str(folder / name / "saved.ckpt") for name in ("folder", "stock")}


@pytest.fixture(scope="module")
def started(forms: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What rank 0 saw of runs that start from each form: of the module that was saved, and of
    others."""
    runs = {}
    for name, path in forms.items():
        grows, moves = (
            {"start_from": path, "grow_tables": True},
            {"start_from": path, "rename": TOWER},
        )
        runs[name] = replace(BEGINS, strategy=plan(RW, DP, CW, checkpoint={"start_from": path}))
        runs[f"{name}, grown"] = replace(
            BEGINS, model=Grown, strategy=plan(CW, RW, TW, checkpoint=grows)
        )
        runs[f"{name}, moved"] = replace(BEGINS, model=Tower, strategy={"checkpoint": moves})
    runs["loose"] = replace(
        BEGINS,
        model=RenamedLoosely,
        strategy={"checkpoint": {"start_from": forms["folder"]}},
        validates=True,
    )
    folder = tmp_path_factory.mktemp("started")
    return run_on_warm_ranks(
        train_each, 2, {name: (run, f"{folder}/{name}") for name, run in runs.items()}
    )[0]


FORMS = (
    "folder",
    "weights of a folder",
    "one file",
    "weights in a file",
    "bare.pt",
    "bare.safetensors",
    "stock",
)


@pytest.mark.parametrize("form", FORMS)
def test_a_new_run_starts_from_weights_in_any_form(
    forms: dict[str, str], started: dict[str, Outcome], form: str
) -> None:
    expected = plain_checkpoint(forms[form])["state_dict"]
    begun = started[form]
    assert not begun.failed, begun.trace
    assert differences(begun.saved["state_dict"], expected, "state_dict", 0.0) == []
    assert (begun.saved["epoch"], begun.saved["global_step"], len(begun.losses)) == (0, 0, 5)
    states = begun.saved["optimizer_states"][0]["state"]
    assert states.keys() == expected.keys()
    for name, state in states.items():
        assert float(state["step"]) == 0, name
        assert bool((state["sum"] == torch.tensor(0.1)).all()), name
    moved = started[f"{form}, moved"]
    assert not moved.failed, moved.trace
    renamed = {
        key.replace("ebc", "tower.tables").replace("mlp", "tower.mlp"): value
        for key, value in expected.items()
    }
    assert differences(moved.saved["state_dict"], renamed, "state_dict", 0.0) == []


@pytest.mark.parametrize("form", FORMS)
def test_grown_tables_keep_their_rows_and_begin_the_others(
    forms: dict[str, str], started: dict[str, Outcome], form: str
) -> None:
    expected, built = (
        plain_checkpoint(forms[form])["state_dict"],
        seeded(Grown, *FROM_A_VALUE).state_dict(),
    )
    begun = started[f"{form}, grown"]
    assert not begun.failed, begun.trace
    for key, value in begun.saved["state_dict"].items():
        rows = len(expected[key])
        assert value.shape == built[key].shape
        assert torch.equal(value[:rows], expected[key]), key
        assert torch.equal(value[rows:], built[key][rows:]), key


def test_what_a_checkpoint_does_not_have_stays_as_it_was_built(
    forms: dict[str, str], started: dict[str, Outcome]
) -> None:
    expected, built = (
        plain_checkpoint(forms["folder"])["state_dict"],
        seeded(Renamed, *FROM_A_VALUE).state_dict(),
    )
    begun = started["loose"]
    assert not begun.failed, begun.trace
    for key, value in begun.saved["state_dict"].items():
        assert torch.equal(value, built[key] if "broad" in key else expected[key]), key
    message = [message for message in begun.messages if "strict_loading" in message]
    assert len(message) == 1
    assert re.search(r"missing.* \['ebc.*broad.weight'\].* only \['ebc.*wide.weight'\]", message[0])


# ---- modules and optimizers that have changed


def changed(cut: str, **options: Any) -> dict[str, Any]:
    return {"strategy": {"sharding_types": [cut], "checkpoint": options}}


RENAMED = {"ebc.embedding_bags.wide": "ebc.embedding_bags.broad"}
CHANGED = {
    "renamed": Life(
        Run(strategy=MIXED),
        2,
        (
            (2, {"model": Renamed, **changed(RW, rename=RENAMED)}),
            (
                2,
                {
                    "model": Renamed,
                    **changed(
                        TW,
                        rename={f"{old}.weight": f"{new}.weight" for old, new in RENAMED.items()},
                    ),
                },
            ),
            (1, {"model": Tower, **changed(CW, rename=TOWER)}),
        ),
    ),
    "renamed, Adam": Life(
        Run(strategy=MIXED, optimizer=ADAM),
        2,
        ((1, {"model": Renamed, **changed(CW, rename=RENAMED)}),),
    ),
    "grown": Life(
        Run(strategy=MIXED, optimizer=FROM_A_VALUE),
        2,
        (
            (2, {"model": Grown, **changed(RW, grow_tables=True)}),
            (1, {"model": Grown, **changed(CW, grow_tables=True)}),
            (
                2,
                {
                    "model": Grown,
                    "strategy": plan(RW, DP, TW, update="dense", checkpoint={"grow_tables": True}),
                },
            ),
        ),
    ),
    "grown, Adam": Life(
        Run(strategy=MIXED, optimizer=ADAM),
        2,
        ((1, {"model": Grown, **changed(RW, grow_tables=True)}),),
    ),
    "grown, RowWiseAdagrad": Life(
        Run(optimizer=ROW_WISE), 2, ((2, {"model": Grown, **changed(RW, grow_tables=True)}),)
    ),
}


@pytest.fixture(scope="module")
def changes() -> dict[str, Lived]:
    """What became of them."""
    return live(CHANGED)


@pytest.mark.parametrize("name", slow_except(["renamed, Adam", "grown, RowWiseAdagrad"], CHANGED))
def test_renamed_and_grown_tables_go_on_with_their_optimizer_state(
    changes: dict[str, Lived], name: str
) -> None:
    assert problems_of(CHANGED[name], changes[name]) == []


def test_further_rows_and_their_optimizer_state_are_those_of_a_new_table(
    changes: dict[str, Lived],
) -> None:
    built = seeded(Grown, *ADAGRAD).state_dict()
    for name in ("grown", "grown, Adam"):
        for (num_ranks, _), outcomes in zip(CHANGED[name].later, changes[name].later, strict=True):
            final = outcomes[0].final
            for key, rows in (
                ("ebc.embedding_bags.wide.weight", 60),
                ("ebc.embedding_bags.narrow.weight", 37),
            ):
                assert torch.equal(final["state_dict"][key][rows:], built[key][rows:]), (
                    name,
                    num_ranks,
                    key,
                )
                for case, value in final["optimizer_states"][0]["state"][key].items():
                    if value.dim():
                        new = value[rows:]
                        assert bool((new == torch.tensor(0.1 if case == "sum" else 0.0)).all()), (
                            name,
                            key,
                            case,
                        )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "more rows": (
        {"model": Grown},
        r"CheckpointError: table 'ebc.wide' is 80 x 16, but the checkpoint's .* is \(60, 16\).*'grow_tables': True",
    ),
    "fewer rows": (
        {"model": Shorter, **changed(RW, grow_tables=True)},
        r"CheckpointError: table 'ebc.wide' is 59 x 16, but the checkpoint's 'ebc.*' is \(60, 16\)",
    ),
    "columns": (
        {"model": Narrower, **changed(RW, grow_tables=True)},
        r"CheckpointError: table 'ebc.\w+' is \d+ x \d+, but the checkpoint's 'ebc.*' is \(\d+, \d+\)",
    ),
    "another table": (
        {"model": Renamed},
        r"CheckpointError: .*missing \['ebc.*broad.weight'\], unexpected \['ebc.*wide.weight'\].*'rename'.*strict_",
    ),
    "two optimizers": (
        {"model": TwoOptimizers},
        "CheckpointError: the checkpoint has the state of 1 optimizer.* returned 2.*'start_from'",
    ),
    "three groups": (
        {"model": Grouped},
        "CheckpointError: optimizer 0 has 3 param groups, and the checkpoint's had 1.*'start_from'",
    ),
    "eps, fused": (
        {"optimizer": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3})},
        "OptimizerError: table 'ebc.*eps=1e-10 was 0.001.*embedding_update='dense'",
    ),
    "weights only": (
        {"resume": "weights.ckpt"},
        "CheckpointError: .* holds weights only.*'start_from'",
    ),
    "weights in a file": (
        {"resume": "one.ckpt"},
        "CheckpointError: .* holds weights only.*'start_from'",
    ),
    "nothing there": (
        {"resume": "nothing.ckpt"},
        "MissingCheckpointError: there is no checkpoint .*nothing.ckpt",
    ),
    "nothing to start from": (
        changed(RW, start_from="/nothing"),
        "MissingCheckpointError: there is no checkpoint /nothing",
    ),
    "no checkpoint": (
        changed(RW, start_from="a list.pt"),
        "CheckpointError: .*a list.pt holds a list",
    ),
    "no state_dict": (
        changed(RW, start_from="nested.pt"),
        "CheckpointError: .*nested.pt.*state_dict",
    ),
    "no torch file": (
        changed(RW, start_from="junk.pt"),
        "CheckpointError: .*junk.pt cannot be read",
    ),
    "no safetensors": (
        changed(RW, start_from="junk.safetensors"),
        "CheckpointError: .*is no safetensors file",
    ),
    "unknown option": (
        changed(RW, start_form="x"),
        "ConfigError: checkpoint: there is no option 'start_form'; did you mean 'start_from'",
    ),
}


def _refused(cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Outcome]:
    train(Run(epochs=1), folder)
    for name, strategy in (("weights.ckpt", {}), ("one.ckpt", ONE_FILE)):
        model, trainer = seeded(Clicks, *ADAGRAD), make_trainer(strategy, limit_train_batches=1)
        trainer.fit(model, loader(2))
        trainer.save_checkpoint(f"{folder}/{name}", weights_only=True)
    runs = {}
    for name, changes_of_run in cases.items():
        run = replace(Run(), **{"epochs": 2, "resume": "saved.ckpt", **changes_of_run})
        options = dict((run.strategy or {}).get("checkpoint", {}))
        if "start_from" in options:
            options["start_from"] = str(Path(folder) / options["start_from"])
            run = replace(
                run, strategy={**(run.strategy or {}), "checkpoint": options}, resume=None
            )
        runs[name] = (
            run if run.resume is None else replace(run, resume=f"{folder}/{run.resume}"),
            f"{folder}/after",
        )
    return train_each(runs)


def write_wrong_files(folder: Path) -> None:
    """Write what some of CASES read."""
    torch.save([1], folder / "a list.pt")
    torch.save({"model": Clicks(*ADAGRAD).state_dict()}, folder / "nested.pt")
    for name in ("junk.pt", "junk.safetensors"):
        (folder / name).write_bytes(b"x" * 100)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """What each rank was told."""
    folder = tmp_path_factory.mktemp("refused")
    write_wrong_files(folder)
    return run_on_warm_ranks(
        _refused, 2, {name: case for name, (case, _) in CASES.items()}, str(folder)
    )


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_go_on_is_an_error_of_ours_on_every_rank(
    refused: list[dict[str, Outcome]], name: str
) -> None:
    for outcomes in refused:
        assert re.match(CASES[name][1], outcomes[name].failed), (
            f"{outcomes[name].failed}\n{outcomes[name].trace}"
        )
    assert refused[0][name].failed == refused[1][name].failed


GOES_ON = {
    "another optimizer": Life(
        Run(),
        2,
        ((2, {"optimizer": MOMENTUM}), (1, {"optimizer": ADAM}), (2, {"optimizer": ROW_WISE})),
    ),
    "a table more": Life(
        Run(strategy={"embedding_update": "dense"}),
        2,
        ((2, {"model": RenamedLoosely}), (1, {"model": RenamedLoosely})),
    ),
    "eps": Life(
        Run(optimizer=(torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2})),
        2,
        ((2, {"optimizer": ADAGRAD, "strategy": {"embedding_update": "dense"}}),),
    ),
}
GROUPS_ADDED = Life(Run(model=LearnsInPart, extra=unfrozen, save=LATER, epochs=4), 2, (ALIKE,))


@pytest.fixture(scope="module")
def gone_on() -> dict[str, Lived]:
    """What became of them."""
    return live(GOES_ON | {"groups added": GROUPS_ADDED})


@pytest.mark.slow
def test_another_optimizer_starts_over_and_reports_it(gone_on: dict[str, Lived]) -> None:
    kinds = (
        "torch.optim.sgd.SGD",
        "torch.optim.adam.Adam",
        "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
    )
    for kind, outcomes in zip(kinds, gone_on["another optimizer"].later, strict=True):
        assert not outcomes[0].failed, outcomes[0].trace
        assert len(outcomes[0].losses) == 20
        assert sum(outcomes[0].losses[-5:]) < sum(outcomes[0].losses[:5])
        warned = [message for message in outcomes[0].messages if "optimizer 0" in message]
        assert len(warned) == 1
        assert f"is a {kind}, and the checkpoint's was a torch.optim.adagrad.Adagrad" in warned[0]
        assert "starts empty" in warned[0]
        assert not any(
            "optimizer 0" in message for outcome in outcomes[1:] for message in outcome.messages
        )
        for state in outcomes[0].final["optimizer_states"][0]["state"].values():
            assert float(state.get("step", 20)) == 20


@pytest.mark.slow
def test_a_table_that_was_not_saved_starts_over_and_reports_it(gone_on: dict[str, Lived]) -> None:
    for outcomes in gone_on["a table more"].later:
        assert not outcomes[0].failed, outcomes[0].trace
        assert len(outcomes[0].losses) == 20
        warned = [message for message in outcomes[0].messages if "broad" in message]
        assert len(warned) == 2, warned
        assert "has no state of 'ebc.embedding_bags.broad.weight'; it starts empty" in warned[1]
        states = outcomes[0].final["optimizer_states"][0]["state"]
        assert [float(state["step"]) for name, state in states.items() if "broad" in name] == [20]
        assert {float(state["step"]) for name, state in states.items() if "broad" not in name} == {
            25
        }


@pytest.mark.slow
def test_groups_that_a_finetuning_callback_added_are_refused_on_every_rank(
    gone_on: dict[str, Lived],
) -> None:
    # Lightning has called the callback, which would add them again, before strategies like this one
    # load anything.
    for outcome in gone_on["groups added"].later[0]:
        assert re.match(
            "CheckpointError: optimizer 0 has 1 param group.*, and the checkpoint's had 2",
            outcome.failed,
        )


@pytest.mark.slow
def test_hyperparameters_are_those_of_the_checkpoint_as_lightning_has_them(
    gone_on: dict[str, Lived],
) -> None:
    assert problems_of(GOES_ON["eps"], gone_on["eps"]) == []

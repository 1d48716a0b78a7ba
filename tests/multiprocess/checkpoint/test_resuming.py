"""A run that goes on from a checkpoint, on any ranks and any plan, is the run that never
stopped."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.serving.describe import describe
from lightning_distrec.serving.export_checkpoint import export
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
from tests.support.trainers import DEFAULTS, make_trainer

TW, RW, CW, TWRW, DP = CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "data_parallel",
)
UPDATES = ("fused", "sparse", "dense")
TABLES = ("wide", "narrow", "shared")
FOLDER, ONE_FILE, BEHIND = (
    {"checkpoint": {"distributed": True}},
    {"checkpoint": {"distributed": False}},
    {"checkpoint": {"async_save": True}},
)

MOMENTUM = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05})
FROM_A_VALUE = (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1})
ROW_WISE = (RowWiseAdagrad, {"lr": 0.05})
ADAM = (torch.optim.Adam, {"lr": 0.01})


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
    """Return one plan of many, in which no two tables are cut alike; saved into a folder."""
    cuts = [CUTS[(number + t + shift) % len(CUTS)] for t in range(3)]
    updates = tuple(UPDATES[(number + t + 2 * shift) % len(UPDATES)] for t in range(3))
    return plan(*cuts, update=updates, **FOLDER)


def from_each(num_ranks: int) -> Life:
    """Return a life on so many ranks that goes on with the same plan there, and with others
    everywhere; together they have each sharding type and update after each other one."""
    later = [(w, {"strategy": turned(num_ranks, 1 + (num_ranks + w) % 4)}) for w in (1, 2, 3, 4)]
    first = Run(strategy=turned(num_ranks), save=MIDDLE)
    return Life(first, num_ranks, ((num_ranks, {}), *later))


def scaled() -> dict[str, Any]:
    """A scale that grows every third step, and has counted to 2 when the run is saved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def stops_early() -> dict[str, Any]:
    """Its patience ends one epoch after the run is saved."""
    return {"callbacks": [EarlyStopping("val_loss", patience=2, min_delta=10.0)]}


def averaged() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.9)]}


def unfrozen() -> dict[str, Any]:
    return {"callbacks": [Unfreezes(epoch=2)]}


MIDDLE = ("on_train_batch_end", 8)
VALIDATED = ("on_validation_end", 10)
LATER = ("on_train_epoch_end", 15)
MIXED = plan(TW, RW, CW)
ALIKE = (2, {})
ONE = (1, {"strategy": plan(RW, CW, TW, update="sparse")})
ONE_DENSE = (1, {"strategy": plan(CW, TWRW, RW, update="dense")})
OTHER_START = {"model_options": {"start": 99}}
PLAIN = {
    "convert_embeddings": "all",
    "tables": {
        "bags.wide": {"sharding_types": [RW]},
        "shared": {"sharding_types": [CW], "min_partition": 4},
    },
}
UNSHUFFLED = Run(shuffle=False)  # Lightning's own strategy for one device draws another order
STOCK = (1, {"strategy": None})

QUICK = {
    "any plan from 2": from_each(2),
    "average, rates, behind the steps": Life(
        Run(
            model=GroupedInSteps,
            optimizer=ADAM,
            extra=averaged,
            save=MIDDLE,
            strategy=MIXED | BEHIND,
        ),
        2,
        (ALIKE, ONE_DENSE),
    ),
    "16-mixed, random numbers": Life(
        Run(
            model=Random,
            model_options={"start": 5},
            extra=scaled,
            optimizer=(torch.optim.SGD, {"lr": 0.5}),
        ),
        2,
        ((2, OTHER_START),),
    ),
    "nn.Embedding": Life(
        Run(model=PlainTables, strategy=PLAIN),
        2,
        (
            (1, {"strategy": {"convert_embeddings": "all"}}),
            (2, {"strategy": {"convert_embeddings": "none"}}),
        ),
    ),
    "one file": Life(
        replace(UNSHUFFLED, strategy=MIXED | ONE_FILE),
        2,
        ((3, {"strategy": plan(RW, DP, TW)}), STOCK),
    ),
    "stock": Life(
        replace(UNSHUFFLED, strategy=None, optimizer=ROW_WISE),
        1,
        ((2, {"strategy": plan(TW, RW, TWRW, update="fused")}),),
    ),
}
SLOW = {f"any plan from {num_ranks}": from_each(num_ranks) for num_ranks in (1, 3, 4)} | {
    "momentum": Life(
        Run(optimizer=MOMENTUM, strategy=plan(DP, CW, RW)), 2, (ALIKE, (1, {"strategy": MIXED}))
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
    "Adam": Life(
        Run(optimizer=ADAM, strategy=MIXED),
        2,
        (ALIKE, (3, {"strategy": plan(RW, TWRW, DP)}), (4, {"strategy": plan(CW)})),
    ),
    "two by hand, SparseAdam": Life(
        Run(
            model=TwoOptimizers,
            optimizer=(torch.optim.SparseAdam, {"lr": 0.01}),
            strategy=plan(TW, RW, CW, update="sparse"),
        ),
        2,
        (ALIKE, ONE),
    ),
    "EmbeddingCollection": Life(
        Run(model=Sequences, strategy={"sharding_types": [RW]}),
        2,
        (
            ALIKE,
            (1, {"strategy": {"sharding_types": [CW]}}),
            (2, {"strategy": {"embedding_update": "dense"}}),
        ),
    ),
    "frozen": Life(Run(model=Frozen, strategy=MIXED), 2, (ALIKE, ONE)),
    "looked up twice": Life(
        Run(model=Twice, optimizer=ROW_WISE, save=MIDDLE),
        2,
        (ALIKE, (3, {"strategy": plan(RW, TWRW, TW)})),
    ),
    "two names": Life(Run(model=NamedTwice, strategy=MIXED), 2, (ALIKE, ONE_DENSE)),
    "built on meta": Life(Run(model_options={"meta": True}, strategy=MIXED), 2, (ALIKE, ONE_DENSE)),
    "last batch": Life(Run(save=("on_train_batch_end", 10), strategy=MIXED), 2, (ALIKE, ONE)),
    "validated": Life(Run(save=VALIDATED, validates=True, strategy=MIXED), 2, (ALIKE, ONE)),
    "accumulation and clipping": Life(
        Run(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}), 2, (ALIKE, ONE)
    ),
    "stops early": Life(
        Run(extra=stops_early, validates=True, epochs=9, save=("on_train_epoch_end", 10)),
        2,
        (ALIKE, (1, {})),
    ),
    "unfrozen later": Life(Run(model=LearnsInPart, extra=unfrozen, epochs=5), 2, (ALIKE, ONE)),
    "unfrozen before": Life(
        Run(model=LearnsInPart, extra=unfrozen, save=LATER, epochs=5), 2, (ALIKE, ONE)
    ),
    "random, validated": Life(
        Run(model=Random, model_options={"start": 5}, save=VALIDATED, validates=True, epochs=4),
        2,
        ((2, OTHER_START),),
    ),
    "other settings, as the checkpoint has them": Life(
        Run(optimizer=(torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2})),
        2,
        ((2, {"optimizer": ADAGRAD, "strategy": {"embedding_update": "dense"}}),),
    ),
}


@cache
def lived(is_quick: bool) -> dict[str, Lived]:
    """Return what became of the lives. The same ranks live them one by one."""
    return live(QUICK if is_quick else SLOW)


@pytest.mark.parametrize("name", slow_except(QUICK, QUICK | SLOW))
def test_a_run_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    assert problems_of((QUICK | SLOW)[name], lived(name in QUICK)[name]) == []


# ---- exported, the words "last" and "best", checkpoints saved by hand, evaluation


def test_what_several_ranks_saved_is_exported_for_the_unsharded_module_and_stock_lightning(
    tmp_path: Path,
) -> None:
    run = Run(model=GroupedInSteps, optimizer=ADAM, shuffle=False, strategy=plan(RW, CW, TW))
    run = replace(run, strategy=(run.strategy or {}) | FOLDER)
    first = run_on_warm_ranks(train, 2, run, str(tmp_path))
    saved, state = tmp_path / "saved.ckpt", first[0].saved["state_dict"]
    described = describe(saved)
    assert (described.problem, described.step, described.num_ranks) == (None, 5, 2)
    assert {
        tensor.name.split(".")[-2]: tensor.sharding_type
        for tensor in described.tensors
        if tensor.sharding_type is not None
    } == dict(zip(TABLES, (RW, CW, TW), strict=True))
    for suffix in ("pt", "safetensors", "ckpt"):
        export(saved, tmp_path / f"plain.{suffix}")
    model = Clicks(*ADAM)
    model.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True), strict=True)
    assert differences(dict(model.state_dict()), dict(state), "pt", 0.0) == []
    read = load_file(tmp_path / "plain.safetensors")
    assert differences(read, dict(state), "safetensors", 0.0) == []
    later = replace(run, strategy=None, resume=str(tmp_path / "plain.ckpt"))
    resumed = run_on_warm_ranks(train, 1, later, str(tmp_path / "stock"))
    life = Life(run, 2, (STOCK,))
    assert problems_of(life, Lived(first, [resumed])) == []


def _fit(max_epochs: int, folder: str, ckpt_path: str | None = None) -> tuple[list[float], Any]:
    """Collective. Return the losses of a run with a checkpoint after each epoch, and its
    trainer."""
    keep = ModelCheckpoint(folder, "{epoch}", monitor="epochs", save_top_k=-1, save_last=True)
    options = {"use_distributed_sampler": True, "enable_checkpointing": True, "callbacks": [keep]}
    model = seeded(Counts, *ADAGRAD)
    trainer = make_trainer(MIXED, max_epochs=max_epochs, **options)
    trainer.fit(model, loader(rank_and_num_ranks()[1]), ckpt_path=ckpt_path)
    return model.losses, trainer


def _by_words(folder: str) -> dict[str, list[float]]:
    by_hand = f"{folder}/by hand.ckpt"
    actual = {"never stopped": _fit(3, f"{folder}/whole")[0]}
    _, trainer = _fit(2, f"{folder}/part")
    trainer.save_checkpoint(by_hand)
    actual["last"] = _fit(3, f"{folder}/part", "last")[0]
    actual["by hand"] = _fit(3, f"{folder}/elsewhere", by_hand)[0]
    actual["at its end"] = _fit(2, f"{folder}/elsewhere", by_hand)[0]
    trainer.fit_loop.max_epochs = 3
    model = trainer.lightning_module  # its tables are sharded since the fit before
    model.losses = []
    trainer.fit(model, loader(rank_and_num_ranks()[1]), ckpt_path="best")  # of the first epoch
    return actual | {"best": model.losses}


def test_last_and_best_and_checkpoints_saved_by_hand_go_on(tmp_path: Path) -> None:
    for actual in run_on_warm_ranks(_by_words, 2, str(tmp_path)):
        whole = actual["never stopped"]
        assert len(whole) == 15
        assert actual["last"] == actual["by hand"] == whole[10:]
        assert actual["best"] == whole[5:]
        assert actual["at its end"] == []


# ---- new runs that start from weights


def _save_forms(folder: str, strategy: dict[str, Any] | None, names: list[str]) -> None:
    """Save after a step: all, and weights only where there is a second name."""
    options = {"limit_train_batches": 1, "use_distributed_sampler": True}
    if strategy is None:
        trainer = pl.Trainer(devices=1, **DEFAULTS | options)
    else:
        trainer = make_trainer(strategy, **options)
    trainer.fit(seeded(Clicks, *FROM_A_VALUE), loader(rank_and_num_ranks()[1]))
    for name, weights_only in zip(names, (False, True), strict=False):
        trainer.save_checkpoint(f"{folder}/{name}", weights_only)


FORMS = (
    "folder",
    "weights of a folder",
    "one file",
    "weights of a file",
    "bare.pt",
    "bare.safetensors",
    "stock",
)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of weights in every form."""
    folder = tmp_path_factory.mktemp("forms")
    for strategy, name in ((FOLDER, "folder"), (ONE_FILE, "file")):
        names = ["one file" if name == "file" else name, f"weights of a {name}"]
        run_on_warm_ranks(_save_forms, 2, str(folder), MIXED | strategy, names)
    run_on_warm_ranks(_save_forms, 1, str(folder), None, ["stock"])
    assert (folder / "folder").is_dir()
    state = plain_checkpoint(folder / "folder")["state_dict"]
    torch.save(state, folder / "bare.pt")
    save_file(state, folder / "bare.safetensors")
    return {name: str(folder / name) for name in FORMS}


def _evaluated(path: str) -> tuple[float, float, list[Tensor]]:
    batches = loader(rank_and_num_ranks()[1], shuffle=False, steps=2, first=10_000)
    model, trainer = seeded(Clicks, *FROM_A_VALUE), make_trainer(MIXED)
    tested = trainer.test(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"]
    validated = trainer.validate(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"]
    return tested, validated, trainer.predict(model, batches, ckpt_path=path)


def test_weights_are_evaluated_on_any_number_of_ranks(forms: dict[str, str]) -> None:
    path = forms["weights of a folder"]
    model = Clicks(*FROM_A_VALUE)
    model.load_state_dict(plain_checkpoint(path)["state_dict"])
    examples = Examples(2 * GLOBAL_BATCH, 10_000).examples
    with torch.no_grad():
        expected = model(join_batches(examples))
        labels = torch.cat([example["label"] for example in examples])
        loss = float(torch.nn.functional.binary_cross_entropy_with_logits(expected, labels))
    for num_ranks in (1, 3):
        actual = run_on_warm_ranks(_evaluated, num_ranks, path)
        for rank, (tested, validated, predicted) in enumerate(actual):
            assert (tested, validated) == pytest.approx((loss, loss), abs=1e-6)
            assert float((torch.cat(predicted) - expected[rank::num_ranks]).abs().max()) <= 1e-6


BEGINS = Run(
    optimizer=FROM_A_VALUE,
    save=("on_train_start", 0),
    epochs=1,
    trainer={"limit_train_batches": 1},
)
TOWER = {"ebc": "tower.tables", "mlp": "tower.mlp"}
GROWN_FORMS, MOVED_FORMS = ("folder", "bare.safetensors"), ("weights of a folder", "one file")


@pytest.fixture(scope="module")
def started(forms: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What rank 0 saw of runs that start from each form: of the module that was saved, and of
    others."""
    runs = {}
    for form, path in forms.items():
        grows = {"start_from": path, "grow_tables": True}
        moves = {"start_from": path, "rename": TOWER}
        runs[form] = replace(BEGINS, strategy=plan(RW, DP, CW, checkpoint={"start_from": path}))
        if form in GROWN_FORMS:
            cut = plan(CW, RW, TW, checkpoint=grows)
            runs[f"{form}, grown"] = replace(BEGINS, model=Grown, strategy=cut)
        if form in MOVED_FORMS:
            runs[f"{form}, moved"] = replace(BEGINS, model=Tower, strategy={"checkpoint": moves})
    loose = {"checkpoint": {"start_from": forms["folder"]}}
    runs["loose"] = replace(BEGINS, model=RenamedLoosely, strategy=loose, validates=True)
    folder = tmp_path_factory.mktemp("started")
    named = {name: (run, f"{folder}/{name}") for name, run in runs.items()}
    outcomes = run_on_warm_ranks(train_each, 2, named)[0]
    assert {name: outcome.trace for name, outcome in outcomes.items() if outcome.failed} == {}
    return outcomes


def test_a_new_run_starts_from_weights_in_any_form(
    forms: dict[str, str], started: dict[str, Outcome]
) -> None:
    for form, path in forms.items():
        expected = plain_checkpoint(path)["state_dict"]
        begun = started[form]
        assert differences(begun.saved["state_dict"], expected, form, 0.0) == []
        assert (begun.saved["epoch"], begun.saved["global_step"], len(begun.losses)) == (0, 0, 1)
        states = begun.saved["optimizer_states"][0]["state"]
        assert states.keys() == expected.keys()
        for name, state in states.items():
            assert float(state["step"]) == 0, name
            assert bool((state["sum"] == torch.tensor(0.1)).all()), name
        if form in MOVED_FORMS:
            renamed = {
                key.replace("ebc", "tower.tables").replace("mlp", "tower.mlp"): value
                for key, value in expected.items()
            }
            moved = started[f"{form}, moved"].saved["state_dict"]
            assert differences(moved, renamed, f"{form}, moved", 0.0) == []


# ---- modules and optimizers that have changed


def changed(cut: str, **options: Any) -> dict[str, Any]:
    return {"strategy": {"sharding_types": [cut], "checkpoint": options}}


DENSE_GROWN = plan(RW, DP, TW, update="dense", checkpoint={"grow_tables": True})
RENAMED = {"ebc.embedding_bags.wide": "ebc.embedding_bags.broad"}
CHANGED = {
    "renamed": Life(
        Run(strategy=MIXED, optimizer=ADAM, epochs=2),
        2,
        (
            (2, {"model": Renamed, **changed(RW, rename=RENAMED)}),
            (1, {"model": Tower, **changed(CW, rename=TOWER)}),
        ),
    ),
    "grown": Life(
        Run(strategy=MIXED, optimizer=FROM_A_VALUE, epochs=2),
        2,
        (
            (2, {"model": Grown, **changed(RW, grow_tables=True)}),
            (1, {"model": Grown, "strategy": DENSE_GROWN}),
        ),
    ),
    "grown, RowWiseAdagrad": Life(
        Run(optimizer=ROW_WISE, epochs=2),
        2,
        ((2, {"model": Grown, **changed(RW, grow_tables=True)}),),
    ),
}


def test_renamed_and_grown_tables_go_on_with_their_optimizer_state() -> None:
    changes = live(CHANGED)
    assert [
        problem for name, life in CHANGED.items() for problem in problems_of(life, changes[name])
    ] == []
    built = seeded(Grown, *ADAGRAD).state_dict()
    for outcomes in changes["grown"].later:
        final = outcomes[0].final
        for table, rows in (("wide", 60), ("narrow", 37)):
            key = f"ebc.embedding_bags.{table}.weight"
            assert torch.equal(final["state_dict"][key][rows:], built[key][rows:]), key
            # of an id that no example has
            sums = final["optimizer_states"][0]["state"][key]["sum"][rows:]
            assert bool((sums == torch.tensor(0.1)).all()), key


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "more rows": (
        {"model": Grown},
        r"CheckpointError: table 'ebc.wide' is 80 x 16, but the checkpoint's .* is \(60, 16\).*"
        "'grow_tables': True",
    ),
    "fewer rows": (
        {"model": Shorter, **changed(RW, grow_tables=True)},
        r"CheckpointError: table 'ebc.wide' is 59 x 16, but the checkpoint's 'ebc.*' is \(60, 16\)",
    ),
    "columns": (
        {"model": Narrower, **changed(RW, grow_tables=True)},
        r"CheckpointError: table 'ebc.\w+' is \d+ x \d+, but the checkpoint's 'ebc.*' is \(\d+, ",
    ),
    "another table": (
        {"model": Renamed},
        r"CheckpointError: .*missing \['ebc.*broad.weight'\], unexpected \['ebc.*wide.weight'\].*"
        "'rename'.*strict_",
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
        {"resume": "weights of a folder"},
        "CheckpointError: .* holds weights only.*'start_from'",
    ),
    "weights in a file": (
        {"resume": "weights of a file"},
        "CheckpointError: .* holds weights only.*'start_from'",
    ),
    "nothing there": (
        {"resume": "nothing.ckpt"},
        "MissingCheckpointError: there is no checkpoint .*nothing.ckpt",
    ),
    "no checkpoint": (
        changed(RW, start_from="a list.pt"),
        "CheckpointError: .*a list.pt holds a list",
    ),
    "no state_dict": (
        changed(RW, start_from="nested.pt"),
        "CheckpointError: .*nested.pt.*state_dict",
    ),
    "an object": (changed(RW, start_from="object.pt"), "CheckpointError: .*object.pt"),
    "unknown option": (
        changed(RW, start_form="x"),
        "ConfigError: checkpoint: there is no option 'start_form'; did you mean 'start_from'",
    ),
}


def _refused_run(changes: dict[str, Any], folder: Path) -> Run:
    """Return a run that goes on from a path, or starts from one, in the folder of the forms."""
    run = replace(Run(optimizer=FROM_A_VALUE, epochs=2, resume="folder"), **changes)
    options = (run.strategy or {}).get("checkpoint", {})
    if "start_from" not in options:
        return replace(run, resume=str(folder / str(run.resume)))
    start = {"start_from": str(folder / options["start_from"])}
    return replace(run, strategy={**(run.strategy or {}), "checkpoint": start}, resume=None)


def test_what_cannot_go_on_is_an_error_of_ours_on_every_rank(
    forms: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(forms["folder"]).parent
    torch.save([1], folder / "a list.pt")
    torch.save({"model": {"w": torch.ones(2)}}, folder / "nested.pt")
    torch.save({"state_dict": {}, "layer": torch.nn.GELU()}, folder / "object.pt")
    runs = {
        name: (_refused_run(changes, folder), str(tmp_path))
        for name, (changes, _) in REFUSALS.items()
    }
    first, other = run_on_warm_ranks(train_each, 2, runs)
    for name, (_, message) in REFUSALS.items():
        failed = first[name].failed
        assert re.match(message, failed), f"{name}: {failed}\n{first[name].trace}"
        assert other[name].failed == failed, name


@pytest.mark.slow
def test_another_optimizer_starts_over_and_reports_it() -> None:
    life = Life(Run(), 2, ((2, {"optimizer": MOMENTUM}), (1, {"optimizer": ADAM})))
    kinds = ("torch.optim.sgd.SGD", "torch.optim.adam.Adam")
    for kind, outcomes in zip(kinds, live({"it": life})["it"].later, strict=True):
        assert not outcomes[0].failed, outcomes[0].trace
        warned = [[text for text in o.messages if "optimizer 0" in text] for o in outcomes]
        assert [len(messages) for messages in warned] == [1, *[0] * (len(outcomes) - 1)]
        assert f"is a {kind}, and the checkpoint's was a torch.optim.adagrad.Ad" in warned[0][0]
        assert "starts empty" in warned[0][0]
        for state in outcomes[0].final["optimizer_states"][0]["state"].values():
            assert float(state.get("step", 10)) == len(outcomes[0].losses) == 10

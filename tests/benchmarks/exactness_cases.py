"""The training jobs that the page about exactness compares: optimizers, updates, ways to run the
loop, precisions."""

import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import DistRecError
from tests.benchmarks.exactness_model import (
    EVERY_FORM,
    SEQUENCE_CUTS,
    Batch,
    Cuts,
    EveryForm,
    State,
    batch_of,
    joined,
    loader,
    train_unsharded,
)
from tests.support.click_model import seeded, train_sharded
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

RANKS = (2, 3)
STEPS = 8
AT_ONCE = 40
"""Cases that run one after the other in the same ranks."""

OPTIMIZERS: dict[str, tuple[type, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1.0}, ("fused", "sparse", "dense")),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}, ("dense",)),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.05}, ("dense",)),
    # Steps of the full rate for gradients that cancelled to almost nothing would compare rounding,
    # not sharding: hence the small rates of what divides by the size of gradients, or its eps.
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-5}, ("fused", "sparse", "dense")),
    "Adagrad weight_decay": (
        torch.optim.Adagrad,
        {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.05},
        ("dense",),
    ),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.02, "eps": 1e-5}, ("fused", "dense")),
    "Adam": (torch.optim.Adam, {"lr": 0.001, "eps": 1e-6}, ("dense",)),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "eps": 1e-6, "weight_decay": 0.1}, ("dense",)),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.001, "eps": 1e-6, "amsgrad": True}, ("dense",)),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001, "eps": 1e-5}, ("dense",)),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, ("dense",)),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.001, "eps": 1e-6}, ("sparse",)),
}
FOR_PRECISION: dict[str, tuple[type, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}, ("fused", "sparse", "dense")),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.05, "initial_accumulator_value": 0.1},
        ("fused", "sparse", "dense"),
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "eps": 0.1}, ("dense",)),
}
"""What float16 state can hold: squares of small gradients are nothing there, so something must
stand beside them."""

SOME_FORMS: Cuts = {
    "mean": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "sequence": ("row_wise", "column_wise"),
    "embedding": ("row_wise",),
}
WAYS = ("plain", "accumulate", "clip norm", "clip value", "scaler", "manual", "freezing", "unequal")
CLIPS = {"clip norm": ("norm", 0.1), "clip value": ("value", 0.001)}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "float16 tables")
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


@dataclass(frozen=True)
class Case:
    """One training job."""

    optimizer: str
    update: str
    way: str = "plain"
    precision: str = ""
    """Of those of the table about precision; "" for the other tables, in float32."""

    @property
    def made_of(self) -> tuple[type, dict[str, Any], tuple[str, ...]]:
        """The optimizer, its options, and the updates that it has."""
        return (FOR_PRECISION if self.precision else OPTIMIZERS)[self.optimizer]

    @property
    def limit(self) -> float:
        """The largest difference that addition in another order may leave."""
        if self.precision not in ("", "32-true"):
            return 1e-3
        return 1e-6 if self.optimizer.startswith("SGD") else 1e-5

    @property
    def cuts(self) -> Cuts:
        """The tables: what the optimizer has an exact form for."""
        forms = EVERY_FORM if self.way == "plain" and not self.precision else SOME_FORMS
        # collections have dense gradients where they are unsharded
        if self.optimizer == "SparseAdam":
            if forms is SOME_FORMS:
                return {
                    "embedding": ("row_wise", "column_wise"),
                    "embedding_bag": ("row_wise", "table_wise"),
                }
            return {
                "embedding": SEQUENCE_CUTS,
                "embedding_bag": tuple(c for c in CUTS_OF_BAGS if c != "data_parallel"),
            }
        if self.optimizer == "RowWiseAdagrad":
            return {
                form: tuple(c for c in cuts if "column" not in c) for form, cuts in forms.items()
            }
        return forms

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, and steps are skipped."""
        return self.way == "scaler" or self.precision == "16-mixed"

    @property
    def model(self) -> dict[str, Any]:
        """What the model is made with."""
        manual = self.way == "manual"
        return {
            "of_tables_only": self.optimizer == "SparseAdam",
            "half": self.precision == "float16 tables",
            "manual": manual,
            "backwards": (1.0, 0.5) if manual and self.update != "fused" else (1.0,),
            "freezes": self.way == "freezing",
            "float32_inside": self.way == "scaler",
        }

    def start(self) -> EveryForm:
        """Return the model with the weights that every rank and the reference start from."""
        optimizer, options, _ = self.made_of
        return seeded(
            EveryForm, {k: v for k, v in self.cuts.items() if v}, optimizer, options, **self.model
        )

    def batches(self, num_ranks: int) -> list[list[Batch]]:
        """Return step -> rank -> batch."""
        steps, ranks, unequal = range(STEPS), range(num_ranks), self.way == "unequal"
        return [
            [batch_of(step, rank, num_ranks, unequal, self.scaled) for rank in ranks]
            for step in steps
        ]

    def trainer_options(self) -> dict[str, Any]:
        """Return what the Trainer is told."""
        options: dict[str, Any] = {"accumulate_grad_batches": 4} if self.way == "accumulate" else {}
        if self.way in CLIPS:
            kind, limit = CLIPS[self.way]
            options |= {"gradient_clip_val": limit, "gradient_clip_algorithm": kind}
        if self.scaled:
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", a_scaler())]
        elif self.precision not in ("", "float16 tables"):
            options["precision"] = self.precision
        return options

    def strategy_options(self) -> dict[str, Any]:
        """Return what the strategy is told: one cut and one update for each table."""
        tables: dict[str, Any] = {}
        for form, cuts in self.cuts.items():
            for cut in cuts:
                name = f"{form}_{cut}"
                update = "dense" if cut == "data_parallel" else self.update
                path = f"tables.{name}" if form.startswith("embedding") else f"tables.{form}.{name}"
                tables[path] = {
                    "sharding_types": [cut],
                    "min_partition": 4,
                    "embedding_update": update,
                }
        return {"convert_embeddings": "all", "tables": tables}


CUTS_OF_BAGS = EVERY_FORM["embedding_bag"]


def a_scaler() -> torch.amp.GradScaler:
    """Return an ordinary loss scaler that grows soon."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


@dataclass
class Outcome:
    """What became of a case on the ranks."""

    state: State = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    scale: float = 1.0
    refused: str = ""
    failed: str = ""


def train(case: Case) -> Outcome:
    """Train on this rank through Lightning, tables sharded. A refusal before the first step is an
    outcome."""
    rank, num_ranks = rank_and_num_ranks()
    model = case.start()
    batches = [rank_results[rank] for rank_results in case.batches(num_ranks)]
    model.train_dataloader = lambda: loader(batches)  # type: ignore[method-assign]
    try:
        _, trainer = train_sharded(model, None, case.strategy_options(), **case.trainer_options())  # type: ignore[arg-type]
    except DistRecError as error:
        if model.seen_dtypes:
            raise
        return Outcome(refused=f"{type(error).__name__}: {error}")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return Outcome(
        model.final_state,
        model.kinds,
        model.seen_dtypes,
        1.0 if scaler is None else scaler.get_scale(),
    )


def _train_all(cases: Sequence[Case], folder: str) -> None:
    """Train one case after the other; rank 0 leaves each outcome in the folder, for what comes
    after may fail."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for index, case in enumerate(cases):
        with redirect_stdout(io.StringIO()):  # the plan of every job
            outcome = train(case)
        if rank_and_num_ranks()[0] == 0:
            torch.save(outcome, f"{folder}/unfinished")
            os.replace(f"{folder}/unfinished", f"{folder}/{index}.pt")


def outcomes_of(
    cases: Sequence[Case], num_ranks: int, tell: Callable[[str], None]
) -> list[Outcome]:
    """Return what became of each case; where a rank raised or hung, the cases after go on in new
    ranks."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        todo = cases[len(outcomes) :][:AT_ONCE]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            failed = ""
            try:
                run_on_ranks(
                    _train_all, num_ranks, todo, folder, timeout_seconds=60 + 5 * len(todo)
                )
            except RankFailed as error:
                failed = str(error)
            done = len(list(Path(folder).glob("*.pt")))
            outcomes += [torch.load(f"{folder}/{i}.pt", weights_only=False) for i in range(done)]
            if failed:
                outcomes.append(Outcome(failed=failed))
        tell(
            f"{num_ranks} ranks: {len(outcomes)} of {len(cases)} cases, "
            f"{time.monotonic() - began:.0f} s"
        )
    return outcomes


@dataclass(frozen=True)
class Reference:
    """What one unsharded process makes of a case."""

    begun: State
    state: State
    scale: float


def reference_of(case: Case, num_ranks: int) -> Reference:
    """Train the case in this process; updates that share their numbers share the run."""
    backwards = case.model["backwards"]
    update = case.update if backwards != (1.0,) else ""
    return _reference(Case(case.optimizer, update or "fused", case.way, case.precision), num_ranks)


@cache
def _reference(case: Case, num_ranks: int) -> Reference:
    model = case.start()
    begun = {key: value.detach().clone() for key, value in model.state_dict().items()}
    batches = [joined(rank_results) for rank_results in case.batches(num_ranks)]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if case.precision == "bf16-mixed":
        context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    elif case.scaled:
        context = lambda: torch.autocast("cpu", torch.float16)  # noqa: E731
    elif case.precision in TRUE_DTYPES:
        model.rows_dtype = TRUE_DTYPES[case.precision]
        model.first.to(model.rows_dtype)
        model.last.to(model.rows_dtype)
        begun = {key: value.detach().clone() for key, value in model.state_dict().items()}
        batches = [
            {k: v.to(model.rows_dtype) if v.is_floating_point() else v for k, v in b.items()}
            for b in batches
        ]
    accumulate = 4 if case.way == "accumulate" else 1
    scaler = a_scaler() if case.scaled else None
    scale = train_unsharded(model, batches, accumulate, CLIPS.get(case.way), scaler, context)
    return Reference(
        begun, {key: value.detach() for key, value in model.state_dict().items()}, scale
    )

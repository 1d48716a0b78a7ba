"""Optimizers by apply_optimizer_in_backward, and TorchRec's wrappers, train tables as they do in
one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torchrec.optim as torchrec_optim
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, optim
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.click_model import (
    ClickModel,
    LooksUpTwice,
    largest_difference,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import State, global_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.resuming import Clicks, Life, Run, live, problems_of
from tests.support.trainers import DEFAULTS, make_trainer

STEPS = 6
Kind = tuple[type, dict[str, Any]]
SGD: Kind = (optim.SGD, {"lr": 0.5})
ADAGRAD: Kind = (optim.Adagrad, {"lr": 0.05})
ROW_WISE: Kind = (RowWiseAdagrad, {"lr": 0.05})
ADAM: Kind = (optim.Adam, {"lr": 0.01})
SHARDINGS: dict[str, Any] = {
    "wide": {"sharding_types": ["column_wise"], "min_partition": 4},
    "narrow": {"sharding_types": ["row_wise"]},
    "shared": {"sharding_types": ["data_parallel"]},
}


def dense_adagrad(model: Any) -> Any:
    return optim.Adagrad(model.mlp.parameters(), lr=0.05)


class InBackward(ClickModel):
    """Has one optimizer for all of its tables that steps in backward, and another one for its
    layers."""

    kinds: tuple[Kind, ...] = (ROW_WISE,)
    configure: Callable[[Any], Any] = dense_adagrad

    def __init__(self, **options: Any) -> None:
        super().__init__(optim.SGD, {"lr": 0.1}, **options)
        self.reasons: set[str] = set()
        self.apply_to(self)

    def apply_to(self, model: Any) -> None:
        """Give each table the next of the kinds."""
        for i, weight in enumerate(model.ebc.parameters()):
            kind, arguments = self.kinds[i % len(self.kinds)]
            _apply_optimizer_in_backward(kind, [weight], arguments)

    def configure_optimizers(self) -> Any:
        return type(self).configure(self)

    def on_train_start(self) -> None:
        if (tables := getattr(self.trainer.strategy, "run_tables", None)) is not None:
            self.reasons = {f"{update.kind}: {update.reason}" for update in tables.updates.values()}
            self.kernels = [sorted(kernel.table_names) for kernel, _ in tables.shards.kernels]


class ByTorchRec(InBackward):
    """Applies it by TorchRec's name, to all tables at once."""

    def apply_to(self, model: Any) -> None:
        apply_optimizer_in_backward(*ROW_WISE[:1], model.ebc.parameters(), ROW_WISE[1])


class OnePerTable(InBackward):
    kinds = (SGD, ROW_WISE, ADAGRAD)


class Adam(InBackward):
    kinds = (ADAM,)


class Mixed(InBackward):
    kinds = (ADAM, ADAGRAD, SGD)


class AllInOptimizer(InBackward):
    """Has another optimizer over everything."""

    kinds = (SGD,)

    def configure(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


class Late(InBackward):
    """Applies it in the hook that `hook` names."""

    hook = ""

    def apply_to(self, model: Any) -> None:
        if model.hook == "__init__":
            super().apply_to(model)

    def setup(self, stage: str) -> None:
        self._reach("setup")

    def configure_model(self) -> None:
        super().configure_model()
        self._reach("configure_model")

    def on_fit_start(self) -> None:
        self._reach("on_fit_start")

    def configure_optimizers(self) -> Any:
        self._reach("configure_optimizers")
        return super().configure_optimizers()

    def _reach(self, hook: str) -> None:
        if hook == self.hook:
            InBackward.apply_to(self, self)


class InSetUp(Late):
    hook = "setup"


class InConfigureModel(Late):
    """Builds its tables in configure_model, where they have no rows yet."""

    kinds = (ADAM, ROW_WISE, ADAGRAD)
    hook = "configure_model"

    def __init__(self) -> None:
        super().__init__(meta=True)

    def configure_model(self) -> None:
        if self.ebc is None:
            super().configure_model()
            for weight in self.ebc.parameters():
                torch.nn.init.constant_(weight, 0.5)


class InConfigureOptimizers(Late):
    hook = "configure_optimizers"


class OnFitStart(Late):
    kinds = (ADAGRAD,)  # RowWiseAdagrad's own constructor reads means of rows, which shards refuse
    hook = "on_fit_start"


class Rates(InBackward):
    """Scales the rates of its tables by hand, each once a step."""

    kinds = (ADAGRAD, ROW_WISE, ADAM)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for weight in self.ebc.parameters():
            for group in weight._in_backward_optimizers[0].param_groups:
                group["lr"] *= 0.8


class RateOfOne(InBackward):
    """Changes the rate of one table only, which shares a kernel with the others."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        next(iter(self.ebc.parameters()))._in_backward_optimizers[0].param_groups[0]["lr"] = 0.01


class ByHand(Mixed):
    """Steps its layers every second batch, and its tables in each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class BackwardByTorch(ByHand):
    """Runs backward past Lightning."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Twice(LooksUpTwice, InBackward):
    """Calls its collection twice in a step."""

    kinds = (SGD,)


class TwiceSummed(Twice):
    kinds = (ROW_WISE, ADAGRAD)


class Filtered(InBackward):
    """Gives what has no optimizer yet to a KeyedOptimizerWrapper, as TorchRec's examples do."""

    def configure(self) -> Any:
        remaining = dict(in_backward_optimizer_filter(self.named_parameters()))
        return KeyedOptimizerWrapper(remaining, lambda parameters: optim.Adam(parameters, lr=0.01))


class Keyed(InBackward):
    """Has one KeyedOptimizerWrapper over everything, with a schedule."""

    kinds = ()

    def apply_to(self, model: Any) -> None:
        """All are in the wrapper."""

    def configure(self) -> Any:
        optimizer = KeyedOptimizerWrapper(
            dict(self.named_parameters()), lambda p: optim.Adagrad(p, lr=0.05)
        )
        falling = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


class Combined(Keyed):
    """Combines one of tables and one of layers."""

    def configure(self) -> Any:
        tables = KeyedOptimizerWrapper(
            dict(self.ebc.named_parameters()), lambda p: optim.Adagrad(p, lr=0.05)
        )
        layers = KeyedOptimizerWrapper(
            dict(self.mlp.named_parameters()), lambda p: optim.SGD(p, lr=0.2)
        )
        return CombinedOptimizer([("tables", tables), ("layers", layers)])


class CombinedByHand(Combined):
    """The same, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class Warm(Keyed):
    def configure(self) -> Any:
        inner = KeyedOptimizerWrapper(dict(self.named_parameters()), lambda p: optim.SGD(p, lr=0.5))
        return WarmupOptimizer(
            inner, [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=3, value=0.1)], lr=0.5
        )


class Clipped(Keyed):
    def configure(self) -> Any:
        inner = KeyedOptimizerWrapper(dict(self.named_parameters()), lambda p: optim.SGD(p, lr=0.5))
        return GradientClippingOptimizer(inner, clipping=GradientClipping.NORM, max_gradient=0.05)


class Marked(InBackward):
    kinds = ((torchrec_optim.PartialRowWiseAdam, {"lr": 0.1}),)


class MarkedInDict(Keyed):
    def configure(self) -> Any:
        return {"optimizer": torchrec_optim.LAMB(self.parameters(), lr=0.1)}


class MarkedInList(Keyed):
    def configure(self) -> Any:
        return [
            optim.SGD(self.mlp.parameters(), lr=0.1),
            torchrec_optim.Adagrad(self.ebc.parameters(), lr=0.1),
        ]


class Two(InBackward):
    """Applies a second one."""

    def setup(self, stage: str) -> None:
        self.apply_to(self)


class Untrained(InBackward):
    """Has tables that nothing updates."""

    def apply_to(self, model: Any) -> None:
        """To none."""


class Case(NamedTuple):
    model: type[InBackward]
    strategy: dict[str, Any] = {}
    trainer: Callable[[], dict[str, Any]] = dict
    fused: str = ""
    """Kinds that are expected, where they matter."""


def accumulated() -> dict[str, Any]:
    return {"accumulate_grad_batches": 2}


def clipped() -> dict[str, Any]:
    return {"gradient_clip_val": 0.05}


CASES = {
    "torchrec's name": Case(ByTorchRec, fused="fused"),
    "one per table": Case(OnePerTable, fused="fused"),
    "any sharding": Case(OnePerTable, {"tables": SHARDINGS}),
    "Adam": Case(Adam, fused="dense"),
    "Adam, by columns": Case(Adam, {"tables": SHARDINGS}),
    "another over everything": Case(AllInOptimizer, fused="fused"),
    "setup": Case(InSetUp, fused="fused"),
    "configure_model": Case(InConfigureModel),
    "configure_model, replicated": Case(
        InConfigureModel, {"tables": {"wide": {"replicated": True}}}
    ),
    "configure_optimizers": Case(InConfigureOptimizers, fused="fused"),
    "rates": Case(Rates),
    "rates, by columns": Case(Rates, {"tables": {"wide": SHARDINGS["wide"]}}),
    "by hand": Case(ByHand),
    "twice": Case(Twice, fused="fused"),
    "twice, summed": Case(TwiceSummed),
    "accumulated": Case(Mixed, trainer=accumulated),
    "clipped": Case(Mixed, trainer=clipped),
    "sparse": Case(OnePerTable, {"tables": {"wide": {"embedding_update": "sparse"}}}, accumulated),
    "fsdp": Case(Mixed, {"dense": "fsdp", "fsdp": {"min_num_parameters": 1}}),
    "filtered": Case(Filtered, fused="fused"),
    "keyed": Case(Keyed, fused="fused"),
    "combined": Case(Combined, fused="sparse"),
    "combined by hand": Case(CombinedByHand),
}


def _fit(case: Case) -> tuple[State, set[str]]:
    model = seeded(case.model)
    trainer = make_trainer(case.strategy, **case.trainer())
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    return model.final_state, model.reasons


def _fit_in_one_process(case: Case, num_ranks: int) -> State:
    model = seeded(case.model)
    trainer = pl.Trainer(strategy="auto", devices=1, **(DEFAULTS | case.trainer()))
    batches = torch.utils.data.DataLoader(
        global_batches(STEPS, num_ranks=num_ranks), batch_size=None
    )
    trainer.fit(model, batches)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What each run on two ranks has trained."""
    return run_each_on_ranks({name: (_fit, case) for name, case in CASES.items()}, 2)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_tables_train_as_in_one_process(results: dict[str, Any], name: str) -> None:
    expected = _fit_in_one_process(CASES[name], 2)
    model = seeded(CASES[name].model)
    model.configure_model()
    before = model.state_dict()
    assert largest_difference(expected, before)["tables"] > 1e-3
    state, reasons = results[name]
    assert max(largest_difference(state, expected).values()) < 1e-6
    if CASES[name].fused:
        assert {reason.split(":")[0] for reason in reasons} == {CASES[name].fused}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_they_do_so_on_other_numbers_of_ranks(num_ranks: int) -> None:
    names = ["one per table", "Adam", "rates", "accumulated"]
    for name, (state, _) in run_each_on_ranks({n: (_fit, CASES[n]) for n in names}, num_ranks)[
        0
    ].items():
        assert (
            max(largest_difference(state, _fit_in_one_process(CASES[name], num_ranks)).values())
            < 1e-6
        ), name


def test_the_start_table_says_whose_the_optimizer_is(results: dict[str, Any]) -> None:
    assert (
        "fused: apply_optimizer_in_backward's RowWiseAdagrad has the same numbers in FBGEMM"
        in results["setup"][1]
    )
    assert (
        "dense: apply_optimizer_in_backward's Adam moves rows that no id touched"
        in results["Adam"][1]
    )


def test_equal_optimizers_share_a_kernel() -> None:
    (kernels,) = run_each_on_ranks({"kernels": (_kernels,)}, 1)
    assert kernels["kernels"] == [["narrow", "shared", "wide"]]


def _kernels() -> list[list[str]]:
    model = seeded(InBackward)
    trainer = make_trainer({
        "tables": {n: {"sharding_types": ["table_wise"]} for n in ("wide", "narrow", "shared")}
    })
    trainer.fit(model, rank_loader(1, 0))
    return model.kernels


def scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


def _refusal(case: Case) -> str:
    try:
        _fit(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


BOTH = {"table_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}}
REFUSED = {
    "after sharding": (Case(OnFitStart), "gave table 'ebc.wide' an optimizer after it was sharded"),
    "two": (Case(Two), "has 2 optimizers by apply_optimizer_in_backward"),
    "and table_optimizer": (
        Case(InBackward, BOTH),
        "and an optimizer by table_optimizer. Remove one",
    ),
    "rate of one": (Case(RateOfOne), "were changed while training, and not those of all tables"),
    "backward by torch": (
        Case(BackwardByTorch),
        "Call self.manual_backward(loss), not loss.backward()",
    ),
    "scaled": (Case(InBackward, {}, scaled), "with scaled gradients. Use 'bf16-mixed'"),
    "replicated, accumulated": (
        Case(InBackward, {"tables": {"shared": SHARDINGS["shared"]}}, accumulated),
        "is averaged over ranks once",
    ),
    "kernel's name": (
        Case(Marked),
        "torchrec.optim.PartialRowWiseAdam (by apply_optimizer_in_backward of table",
    ),
    "kernel's name in a dict": (
        Case(MarkedInDict),
        "torchrec.optim.LAMB (by configure_optimizers) only names a kernel of FBGEMM, and no "
        "process can step it. In "
        "configure_optimizers, or for tables alone by table_optimizer, use RowWiseAdagrad",
    ),
    "kernel's name in a list": (
        Case(MarkedInList),
        "OptimizerError: torchrec.optim.Adagrad (by configure_optimizers)",
    ),
    "warm-up": (Case(Warm), "WarmupOptimizer, which changes rates or gradients inside of `step`"),
    "clipping": (Case(Clipped), "set gradient_clip_val and gradient_clip_algorithm"),
}


def test_what_cannot_be_exact_is_refused_on_all_ranks() -> None:
    per_rank = run_each_on_ranks({name: (_refusal, case) for name, (case, _) in REFUSED.items()}, 2)
    for name, (_, message) in REFUSED.items():
        for refusals in per_rank:
            assert message in refusals[name], (name, refusals[name])


class Evaluated(OnePerTable):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class PlainTables(InBackward):
    kinds = (SGD,)


def _fit_again() -> State:
    """Fit twice, take the module out of its shards, and fit it in this process alone."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(PlainTables)
    for _ in range(2):
        trainer = make_trainer()
        trainer.fit(model, rank_loader(STEPS, rank))
    trainer.strategy.unshard()
    _train_alone(model, num_ranks)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _train_alone(model: Any, num_ranks: int) -> None:
    loader = torch.utils.data.DataLoader(
        global_batches(STEPS, num_ranks=num_ranks), batch_size=None
    )
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(loader):
        optimizer.zero_grad()
        model._trainer = None
        model.training_step(batch, index).backward()
        optimizer.step()


def _validate_and_fit() -> State:
    rank, _ = rank_and_num_ranks()
    model = seeded(Evaluated)
    make_trainer().validate(model, rank_loader(1, rank), verbose=False)
    make_trainer().fit(model, rank_loader(STEPS, rank))
    return model.final_state


def _fit_twice_with_state() -> str:
    for model in [seeded(InBackward)] * 2:
        refusal = _refusal_of(model)
    return refusal


def _refusal_of(model: Any) -> str:
    try:
        make_trainer().fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_they_last_longer_than_a_run() -> None:
    calls = {
        "again": (_fit_again,),
        "validated": (_validate_and_fit,),
        "state": (_fit_twice_with_state,),
    }
    result = run_each_on_ranks(calls, 2)[0]
    alone = seeded(PlainTables)
    for _ in range(3):
        _train_alone(alone, 2)
    # Six steps of float32: 1.1e-6 in a dense layer on some CPUs, whose matrix products sum in
    # another order.
    assert max(largest_difference(result["again"], alone.state_dict()).values()) < 3e-6
    expected = _fit_in_one_process(Case(Evaluated), 2)
    assert max(largest_difference(result["validated"], expected).values()) < 1e-6
    assert "its RowWiseAdagrad has stepped before" in result["state"]
    assert "with apply_optimizer_in_backward, make a new module" in result["state"]


def _warnings(case: Case) -> list[str]:
    with pytest.warns(UserWarning, match="no optimizer") as caught:
        _fit(case)
    return [str(warning.message) for warning in caught]


def test_a_table_in_no_optimizer_is_told() -> None:
    messages = run_each_on_ranks({"untrained": (_warnings, Case(Untrained))}, 1)[0]["untrained"]
    assert any(
        "table 'ebc.wide' and 2 more can be trained and is in no optimizer" in message
        for message in messages
    )


class Resumed(Clicks):
    """A model whose tables have optimizers of two kinds in backward."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.configure_model()
        for weight, (kind, arguments) in zip(
            self.ebc.parameters(), [ADAM, ROW_WISE, ADAGRAD], strict=True
        ):
            _apply_optimizer_in_backward(kind, [weight], arguments)

    def configure_optimizers(self) -> Any:
        return KeyedOptimizerWrapper(
            dict(self.mlp.named_parameters()), lambda p: optim.Adam(p, lr=0.01)
        )


class ResumedCombined(Clicks):
    """A model with a CombinedOptimizer, stepped by hand: automatic optimization runs each step for
    each member."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        tables = KeyedOptimizerWrapper(
            dict(self.ebc.named_parameters()), lambda p: optim.Adagrad(p, lr=0.05)
        )
        layers = KeyedOptimizerWrapper(
            dict(self.mlp.named_parameters()), lambda p: optim.Adam(p, lr=0.01)
        )
        return CombinedOptimizer([("tables", tables), ("layers", layers)])


PLAN = {"tables": {"wide": SHARDINGS["wide"], "narrow": {"sharding_types": ["row_wise"]}}}
LIVES = {
    "a folder": Life(
        Run(model=Resumed, strategy=PLAN | {"checkpoint": {"distributed": True}}),
        2,
        ((2, {}), (1, {"strategy": {"embedding_update": "dense"}}), (3, {"strategy": {}})),
    ),
    "a file": Life(Run(model=Resumed, trainer={"accumulate_grad_batches": 2}), 2, ((1, {}),)),
    "combined": Life(Run(model=ResumedCombined), 2, ((2, {}), (3, {}))),
}


@pytest.fixture(scope="module")
def lived() -> dict[str, Any]:
    """What became of runs that are saved, and go on elsewhere."""
    return live(LIVES)


@pytest.mark.parametrize("life", LIVES)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(lived: dict[str, Any], life: str) -> None:
    assert problems_of(LIVES[life], lived[life]) == []

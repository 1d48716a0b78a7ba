"""Optimizers by apply_optimizer_in_backward, and TorchRec's wrappers, train tables as they do in
one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    apply_optimizer_in_backward,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.cases import Case, case_of, check, check_refused
from tests.support.click_model import ClickModel, LooksUpTwice
from tests.support.parameters import slow_except
from tests.support.resuming import Clicks, Life, Run, live, problems_of

Kind = tuple[type, dict[str, Any]]
SGD: Kind = (optim.SGD, {"lr": 0.5})
ADAGRAD: Kind = (optim.Adagrad, {"lr": 0.05})
ROW_WISE: Kind = (RowWiseAdagrad, {"lr": 0.05})
ADAM: Kind = (optim.Adam, {"lr": 0.01})
MIXED = (ADAM, ADAGRAD, SGD)
PER_TABLE = (SGD, ROW_WISE, ADAGRAD)
SHARDINGS: dict[str, Any] = {
    "wide": {"sharding_types": ["column_wise"], "min_partition": 4},
    "narrow": {"sharding_types": ["row_wise"]},
    "shared": {"sharding_types": ["data_parallel"]},
}


def dense_adagrad(model: Any) -> Any:
    return optim.Adagrad(model.mlp.parameters(), lr=0.05)


def sgd_over_everything(model: Any) -> Any:
    return optim.SGD(model.parameters(), lr=0.1)


def keyed(parameters: Any, kind: Kind) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(parameters), lambda weights: kind[0](weights, **kind[1]))


def adam_over_the_rest(model: Any) -> Any:
    return keyed(in_backward_optimizer_filter(model.named_parameters()), ADAM)


def keyed_with_schedule(model: Any) -> Any:
    optimizer = keyed(model.named_parameters(), ADAGRAD)
    falling = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def combined(model: Any) -> Any:
    tables = keyed(model.ebc.named_parameters(), ADAGRAD)
    layers = keyed(model.mlp.named_parameters(), ADAM)
    return CombinedOptimizer([("tables", tables), ("layers", layers)])


def clipped(model: Any) -> Any:
    inner = keyed(model.named_parameters(), SGD)
    return GradientClippingOptimizer(inner, clipping=GradientClipping.NORM, max_gradient=0.05)


def lamb_in_dict(model: Any) -> Any:
    return {"optimizer": torchrec_optim.LAMB(model.parameters(), lr=0.1)}


class InBackward(ClickModel):
    """Gives each table the next of `kinds` in the hooks that `hooks` names, and its layers another
    optimizer.

    configure: makes what configure_optimizers returns. by_torchrec: by TorchRec's name, to all
    tables at once. on_meta: tables are built in configure_model, where they have no rows yet.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...] = (ROW_WISE,),
        configure: Callable[[Any], Any] = dense_adagrad,
        hooks: tuple[str, ...] = ("__init__",),
        by_torchrec: bool = False,
        on_meta: bool = False,
    ) -> None:
        super().__init__(optim.SGD, {"lr": 0.1}, meta=on_meta)
        self.kinds, self.configure, self.hooks = kinds, configure, hooks
        self.by_torchrec = by_torchrec
        self.reach("__init__")

    def reach(self, hook: str) -> None:
        """Apply optimizers where this hook is named."""
        if hook not in self.hooks or not self.kinds:
            return
        if self.by_torchrec:
            kind, options = self.kinds[0]
            apply_optimizer_in_backward(kind, self.ebc.parameters(), options)
            return
        for i, weight in enumerate(self.ebc.parameters()):
            kind, options = self.kinds[i % len(self.kinds)]
            _apply_optimizer_in_backward(kind, [weight], options)

    def setup(self, stage: str) -> None:
        self.reach("setup")

    def on_fit_start(self) -> None:
        self.reach("on_fit_start")

    def configure_model(self) -> None:
        if self.ebc is None:
            super().configure_model()
            for weight in self.ebc.parameters():
                torch.nn.init.constant_(weight, 0.5)
            self.reach("configure_model")

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        return self.configure(self)


class Rates(InBackward):
    """Scales the rates of its tables by hand, each once a step, or that of one table only."""

    def __init__(self, *, num_tables: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.num_tables = num_tables

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for weight in list(self.ebc.parameters())[: self.num_tables]:
            for group in weight._in_backward_optimizers[0].param_groups:
                group["lr"] *= 0.8


class ByHand(InBackward):
    """Steps its layers at each of so many batches, and its tables in each backward."""

    def __init__(self, *, every: int = 2, past_lightning: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.every, self.past_lightning = every, past_lightning

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward = loss.backward if self.past_lightning else partial(super().manual_backward, loss)
        backward(*args, **kwargs)


class Twice(LooksUpTwice, InBackward):
    """Calls its collection twice in a step."""


class Evaluated(InBackward):
    """Is validated before it is trained."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def case(kind: type = InBackward, **values: Any) -> Case:
    """Return a case. values: fields of Case, and options of the model."""
    return case_of(kind, **values)


def at(hook: str, **values: Any) -> Case:
    """Return a case of a model that applies optimizers in this hook."""
    return case_of(InBackward, hooks=(hook,), on_meta=hook == "configure_model", **values)


ACCUMULATED = {"accumulate_grad_batches": 2}
SAID_OF_ADAM = "dense: apply_optimizer_in_backward's Adam moves rows that no id touched"
SAID_OF_ROWS = "fused: apply_optimizer_in_backward's RowWiseAdagrad has the same numbers in FBGEMM"
WHOLE = {"tables": {"wide": {"replicated": True}}}
BY_COLUMNS = {"tables": {"wide": SHARDINGS["wide"]}}
CASES = {
    "torchrec's name": case(by_torchrec=True, updates="fused"),
    "one per table, three ranks": case(kinds=PER_TABLE, num_ranks=3, updates="fused"),
    "one rank": case(kinds=MIXED, num_ranks=1, trainer=ACCUMULATED),
    "any sharding": case(kinds=PER_TABLE, strategy={"tables": SHARDINGS}),
    "Adam": case(kinds=(ADAM,), updates="dense", told=(SAID_OF_ADAM,)),
    "another over everything": case(kinds=(SGD,), configure=sgd_over_everything, updates="fused"),
    "setup": at("setup", updates="fused", told=(SAID_OF_ROWS,)),
    "configure_model": at("configure_model", kinds=(ADAM, ROW_WISE), strategy=WHOLE),
    "configure_optimizers": at("configure_optimizers", updates="fused"),
    "rates, by columns": case(kinds=(ADAGRAD, ROW_WISE, ADAM), kind=Rates, strategy=BY_COLUMNS),
    "by hand": case(kinds=MIXED, kind=ByHand),
    "twice": case(kinds=(ROW_WISE, ADAGRAD, SGD), kind=Twice),
    "accumulated and clipped": case(kinds=MIXED, trainer=ACCUMULATED | {"gradient_clip_val": 0.05}),
    "fsdp": case(kinds=MIXED, strategy={"dense": "fsdp", "fsdp": {"min_num_parameters": 1}}),
    "filtered": case(configure=adam_over_the_rest, updates="fused"),
    "keyed": case(kinds=(), configure=keyed_with_schedule, updates="fused"),
    "combined": case(kinds=(), configure=combined, updates="sparse"),
    "combined by hand": case(kinds=(), configure=combined, kind=ByHand, every=1),
    "fitted twice": case(kinds=(SGD,), fits=2, limit=3e-6),
    "validated before": case(kinds=PER_TABLE, kind=Evaluated, validates_first=True),
    "in no optimizer": case(
        kinds=(),
        rests=("ebc",),
        told=("table 'ebc.wide' and 2 more can be trained and is in no optimizer",),
    ),
}
TABLE_OPTIMIZER = {"table_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}}
SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
KERNEL_NAME = "torchrec.optim.LAMB (by configure_optimizers) only names a kernel of FBGEMM"
REFUSED = {
    "gave table 'ebc.wide' an optimizer after it was sharded": at("on_fit_start", kinds=(ADAGRAD,)),
    "has 2 optimizers by apply_optimizer_in_backward": case(hooks=("__init__", "setup")),
    "and an optimizer by table_optimizer. Remove one": case(strategy=TABLE_OPTIMIZER),
    "were changed while training, and not those of all tables": case(kind=Rates, num_tables=1),
    "Call self.manual_backward(loss), not loss.backward()": case(
        kinds=MIXED,
        kind=ByHand,
        past_lightning=True,
        strategy={"sharding_types": ["row_wise"]},  # each rank has rows that miss it
    ),
    "with scaled gradients. Use 'bf16-mixed'": case(trainer=SCALED),
    "is averaged over ranks once": case(
        strategy={"tables": {"shared": SHARDINGS["shared"]}}, trainer=ACCUMULATED
    ),
    "torchrec.optim.PartialRowWiseAdam (by apply_optimizer_in_backward of table": case(
        kinds=((torchrec_optim.PartialRowWiseAdam, {"lr": 0.1}),)
    ),
    KERNEL_NAME: case(kinds=(), configure=lamb_in_dict),
    "set gradient_clip_val and gradient_clip_algorithm": case(kinds=(), configure=clipped),
    "its RowWiseAdagrad has stepped before": case(fits=2),
}


SLOW = (
    "one rank",
    "setup",
    "another over everything",
    "combined by hand",
    "filtered",
    "fitted twice",
    "configure_optimizers",
)
"""Rows whose parts others have."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_except(set(CASES) - {*SLOW}, CASES))
def test_tables_train_as_in_one_process(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_exact_is_refused_on_all_ranks(message: str) -> None:
    check_refused(REFUSED[message], message)


def kernels(trainer: Any) -> list[list[str]]:
    shards = sharded_tables_of(trainer.lightning_module)
    assert shards is not None
    return [sorted(kernel.table_names) for kernel, _ in shards.kernels]


class Resumed(Clicks):
    """A model whose tables have optimizers of two kinds in backward."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.configure_model()
        kinds = [ADAM, ROW_WISE, ADAGRAD]
        for weight, (kind, arguments) in zip(self.ebc.parameters(), kinds, strict=True):
            _apply_optimizer_in_backward(kind, [weight], arguments)

    def configure_optimizers(self) -> Any:
        return keyed(self.mlp.named_parameters(), ADAM)


class ResumedCombined(Clicks):
    """A model with a CombinedOptimizer, stepped by hand: automatic optimization runs each step for
    each member."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return combined(self)


PLAN = {"tables": {"wide": SHARDINGS["wide"], "narrow": SHARDINGS["narrow"]}}
LIVES = {
    "a folder": Life(
        Run(model=Resumed, strategy=PLAN | {"checkpoint": {"distributed": True}}),
        2,
        ((2, {}), (1, {"strategy": {"embedding_update": "dense"}})),
    ),
    "a file": Life(Run(model=Resumed, trainer=ACCUMULATED), 2, ((1, {}),)),
    "combined": Life(Run(model=ResumedCombined), 2, ((2, {}),)),
}


def test_runs_that_go_on_are_those_that_never_stopped() -> None:
    lived = live(LIVES)
    for name, life in LIVES.items():
        assert problems_of(life, lived[name]) == [], name

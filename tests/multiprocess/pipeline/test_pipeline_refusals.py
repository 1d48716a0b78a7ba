"""What `pipeline_parallel` cannot do exactly, refused on every rank."""

import re
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec import PipelineParallelStrategy
from lightning_distrec.errors import DistRecError
from tests.support.chain_models import Flat, Sequence, Transformer
from tests.support.dense_models import TwoByHand, WithBatchNorm, WithEmbedding, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS


class AfterTheChain(Transformer):
    """Uses a weight before the chain that is registered after it."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ParameterList([torch.ones(1)])

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * self.late[0])


class Between(Sequence):
    """Computes something between two blocks."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.model[0](inputs)
        for layer in list(self.model)[1:]:
            hidden = layer(hidden * 2)
        return hidden


class Summed(Sequence):
    """Its loss is a sum over examples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1], reduction="sum")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Flattened(Sequence):
    """Its optimizer needs all gradients at once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Stale(Sequence):
    """Its optimizer has parameters from before."""

    def __init__(self) -> None:
        super().__init__()
        at_start = list(self.parameters())
        # a list in an attribute would follow the module
        self.parameters_at_start = lambda: at_start

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters_at_start(), 0.1)


class Counts(Sequence):
    """Logs a sum over examples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("count", float(len(batch[0])), reduce_fx="sum", on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


class Clips(Sequence):
    """Clips by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Differs(Sequence):
    """Every rank draws its own order."""

    def train_dataloader(self) -> Any:
        return loader(rank_and_num_ranks()[0], 2)


class Draws(Sequence):
    """Draws its batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def _refusal_afterwards(strategy: Any) -> str:
    model = Sequence()
    for run_strategy in (PipelineParallelStrategy(), strategy):
        try:
            options = DEFAULTS | {"max_steps": 1}
            pl.Trainer(strategy=run_strategy, devices=rank_and_num_ranks()[1], **options).fit(
                model, loader()
            )
        except DistRecError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def _refusal(
    kind: type[pl.LightningModule], options: dict[str, Any], settings: dict[str, Any]
) -> str:
    if settings == AVERAGED:
        settings = {"callbacks": [EMAWeightAveraging()]}
    trainer = pl.Trainer(
        strategy=PipelineParallelStrategy(**options),
        devices=rank_and_num_ranks()[1],
        **DEFAULTS | settings,
    )
    train = None if issubclass(kind, Sequence | Transformer | Flat) else loader()
    try:
        trainer.fit(kind(), train)
    except DistRecError as error:
        return f"{type(error).__name__}: {re.sub('^rank 0: ', '', str(error))}"
    return "nothing"


class Jumps(Flat):
    """Adds an output of the first stage to one of the second."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.fc1(inputs)
        return self.fc3(self.fc2(hidden) + hidden.mean(1, keepdim=True))


AVERAGED = {"callbacks": "averages"}
MICRO = {"schedule": "1f1b"}
REFUSED: dict[str, tuple[Any, str]] = {
    "weights after the chain": (
        (_refusal, AfterTheChain, {}, {}),
        "UnsupportedError: the input of 'blocks' depends on weights that the last stage has",
    ),
    "between": (
        (_refusal, Between, {}, {}),
        "UnsupportedError: forward computes something between 'model.0' and",
    ),
    "sum": (
        (_refusal, Summed, MICRO, {}),
        "UnsupportedError: training_step's loss of the first batch is ",
    ),
    "batch norm": (
        (_refusal, WithBatchNorm, {}, {}),
        "UnsupportedError: 'net.1' (BatchNorm1d) uses the statistics",
    ),
    "by hand": (
        (_refusal, TwoByHand, {}, {}),
        "UnsupportedError: automatic_optimization=False: stages run backward",
    ),
    "sparse": ((_refusal, WithEmbedding, {}, {}), "UnsupportedError: 'table' has sparse gradients"),
    "averages": (
        (_refusal, Sequence, {}, AVERAGED),
        "UnsupportedError: EMAWeightAveraging averages all weights on",
    ),
    "precision": (
        (_refusal, Sequence, {}, {"precision": "16-true"}),
        "UnsupportedError: Trainer(precision='16-true')",
    ),
    "optimizer": (
        (_refusal, Flattened, {}, {}),
        "OptimizerError: pipeline_parallel: LBFGS is not known to update",
    ),
    "stale": (
        (_refusal, Stale, {}, {}),
        "OptimizerError: configure_optimizers gave SGD, param group 0, a parameter",
    ),
    "clips": (
        (_refusal, Clips, {}, {}),
        "UnsupportedError: torch.nn.utils.clip_grad_norm_ was called with gradients",
    ),
    "batches": (
        (_refusal, Differs, {}, {}),
        "DataError: training_step: the ranks of a pipeline have different",
    ),
    "iterators": (
        (_refusal, Draws, {}, {}),
        "UnsupportedError: training_step(dataloader_iter): a rank runs it more",
    ),
    "ddp_tuned afterwards": ((_refusal_afterwards, "ddp_tuned"), "ConfigError: ddp_tuned: 'model."),
    "fsdp_tuned afterwards": (
        (_refusal_afterwards, "fsdp_tuned"),
        "ConfigError: fsdp_tuned: 'model.",
    ),
    "stages": (
        (_refusal, Sequence, {"stages": 3}, {}),
        "ConfigError: pipeline_parallel: 2 ranks cannot be pipelines",
    ),
    "a logged sum": (
        (_refusal, Counts, MICRO, {}),
        "UnsupportedError: self.log('count') of the first batch is ",
    ),
    "a logged sum of whole batches": ((_refusal, Counts, {}, {}), "nothing"),
    "a sum of the batch": ((_refusal, Summed, {}, {}), "nothing"),
    "moved to the first stage": (
        (_refusal, AfterTheChain, {"first_stage": ["late"]}, {}),
        "nothing",
    ),
}


def test_what_cannot_be_exact_is_refused_on_every_rank() -> None:
    per_rank_messages = run_each_on_ranks({name: call for name, (call, _) in REFUSED.items()}, 2)
    for name, (_, expected) in REFUSED.items():
        for messages in per_rank_messages:
            assert messages[name].startswith(expected), (name, messages[name])


def test_what_stages_of_called_layers_cannot_pass_on_is_refused_on_every_rank() -> None:
    options = {"chain": "", "split": ["fc2"]}
    for message in run_on_ranks(_refusal, 2, Jumps, options, {}, timeout_seconds=60):
        assert re.search("forward does not go on from 'fc[12]', where a stage begins", message)

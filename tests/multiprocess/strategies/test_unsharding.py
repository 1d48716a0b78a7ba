"""After a run: shards are not pickled or exported without a word, and `unshard` makes the module an
ordinary one."""

import copy
import io
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.embedding_models import loader, pairs
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "torchrec": (TorchRecShardedStrategy, {"convert_embeddings": "all"}),
    "torchrec, fsdp": (TorchRecShardedStrategy, {"convert_embeddings": "all", "dense": "fsdp"}),
    "fsdp": (TunedFSDPStrategy, {"min_num_parameters": 1, "activation_checkpointing": True}),
    "ddp": (TunedDDPStrategy, {"comm_dtype": "bf16"}),
}
IDS = (torch.arange(6), torch.arange(6) + 3)


class Ratings(pl.LightningModule):
    """Two ordinary nn.Embeddings, one of them frozen, and layers of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(50, 8), nn.Embedding(70, 8)
        self.films.weight.requires_grad_(False)
        self.hidden, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.hidden.weight
        self.top = nn.Linear(16, 1)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        pair = torch.cat([self.users(users), self.films(films)], 1)
        return self.top(self.tied(self.hidden(pair).relu())).squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        users, films = batch
        return nn.functional.mse_loss(self(users, films), ((users + films) % 3).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.05)


def _messages(model: Any, trainer: pl.Trainer, in_fit: bool) -> dict[str, str]:
    """Return what each way to lose shards, or to trace through them, ends with."""
    ways: dict[str, Any] = {
        "torch.save(trainer.model)": lambda: torch.save(trainer.model, io.BytesIO()),
        "torch.save(state_dict)": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "torch.save(parameters)": lambda: torch.save(list(model.parameters()), io.BytesIO()),
        "pickle": lambda: pickle.dumps(model),
        "export": lambda: torch.export.export(model, IDS),
        "script": lambda: model.to_torchscript(),
        "trace": lambda: model.to_torchscript(method="trace", example_inputs=IDS),
    }
    if in_fit:
        ways["unshard"] = lambda: trainer.strategy.unshard()
    else:
        ways["torch.save(trainer)"] = lambda: torch.save(trainer, io.BytesIO())
    actual = {}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:
            actual[name] = f"{type(error).__name__}: {error}"
        else:
            actual[name] = "it worked"
    return actual


class Looks(pl.Callback):
    """Tries each way inside of fit."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.messages = _messages(module, trainer, in_fit=True)


def _run(kind: str, rank_0_only: bool) -> dict[str, Any]:
    rank, num_ranks = rank_and_num_ranks()
    torch.manual_seed(3)
    strategy, arguments = KINDS[kind]
    looks, model = Looks(), Ratings()
    trainer = pl.Trainer(
        strategy=strategy(**arguments), devices=num_ranks, callbacks=[looks], **DEFAULTS
    )
    trainer.fit(model, loader([pairs(step, rank) for step in range(3)]))
    trainer.callbacks.remove(looks)
    actual: dict[str, Any] = {"in fit": looks.messages}
    full = {key: value.clone() for key, value in trainer.strategy.full_state_dict().items()}
    actual["full"] = full
    unsharded = trainer.strategy.unshard(rank_0_only=rank_0_only)
    if unsharded is None:
        return actual | {"meta": [p.is_meta for p in model.parameters()]}
    assert unsharded is model
    actual["after"] = _messages(model, trainer, in_fit=False)
    assert type(model) is Ratings
    assert type(model.users) is nn.Embedding
    assert model.tied.weight is model.hidden.weight
    actual["frozen"] = [name for name, p in model.named_parameters() if not p.requires_grad]
    actual["state"] = {key: value.clone() for key, value in model.state_dict().items()}
    actual["output"] = model(*IDS).detach()
    assert torch.equal(copy.deepcopy(model)(*IDS), model(*IDS))
    assert torch.equal(torch.export.export(model, IDS).module()(*IDS), model(*IDS))
    Ratings().load_state_dict(model.state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    actual["file"] = buffer.getvalue()
    if not rank_0_only:  # it can be sharded once more
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader([pairs(step, rank) for step in range(3)]))
        full = trainer.strategy.full_state_dict()
        actual["trained on"] = full["users.weight"].clone() if rank == 0 else None
        trainer.strategy.unshard()
        actual["again"] = model.users.weight.detach().clone()
    first = pl.Trainer(
        **(DEFAULTS | {"devices": 1}), strategy=pl.strategies.SingleDeviceStrategy("cpu")
    )
    first.fit(model, loader([pairs(step, 0) for step in range(2)]))
    actual["steps"] = first.global_step
    return actual


@pytest.mark.parametrize(
    "rank_0_only", slow_except([True], [False, True]), ids=["all ranks", "rank 0"]
)
def test_unshard_makes_the_module_an_ordinary_one_and_before_it_shards_are_refused(
    rank_0_only: bool,
) -> None:
    ranks = run_each_on_ranks({kind: (_run, kind, rank_0_only) for kind in KINDS}, 2)
    for kind in KINDS:
        expected = ranks[0][kind]["full"]
        for rank, result in enumerate(rank_result[kind] for rank_result in ranks):
            in_fit = result["in fit"]
            assert in_fit.pop("unshard").startswith(
                "ShardingError: trainer.strategy.unshard() was called while"
            ), kind
            for way, message in in_fit.items():
                if kind == "ddp":
                    assert message == "it worked" or way in ("script", "trace", "export"), (
                        way,
                        message,
                    )
                    continue
                # it reads weights first
                if way == "export" and message.startswith("ShardedWeightError: "):
                    assert (
                        "To export the module, call trainer.strategy.unshard() on every rank"
                        in message
                    )
                    continue
                assert message.startswith("ShardingError: "), (kind, way, message)
                for way_out in (
                    "strategy.full_state_dict()",
                    "trainer.save_checkpoint",
                    "strategy.unshard()",
                ):
                    assert way_out in message, (kind, way)
            if rank_0_only and rank:
                assert all(result["meta"]) or kind == "ddp" or "fsdp" not in kind, kind
                continue
            assert set(result["after"].values()) == {"it worked"}, (kind, result["after"])
            assert result["frozen"] == ["films.weight"]
            assert result["state"].keys() == expected.keys()
            assert all(torch.equal(result["state"][key], expected[key]) for key in expected), kind
            assert result["steps"] == 2
            repeated = torch.load(io.BytesIO(result["file"]), weights_only=False)
            assert torch.equal(repeated(*IDS), result["output"])
        if not rank_0_only:
            for result in (rank_result[kind] for rank_result in ranks):
                assert torch.equal(result["again"], ranks[0][kind]["trained on"])
                assert not torch.equal(result["again"], expected["users.weight"])

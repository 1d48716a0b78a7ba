"""Fits under each strategy in one process, which prints what they change in upstream's classes and
modules meanwhile.

The two ranks are each one of a node: RANK, WORLD_SIZE and MASTER_ADDR are set, as by a launcher.
Those fits that fail have a callback that counts exchanges.
"""

import importlib
import inspect
import json
import os
import sys
from types import ModuleType
from typing import Any

RESULT = "PATCHED "
UPSTREAM = ("lightning.", "torch.", "torchrec.", "fbgemm_gpu.", "torchmetrics.")
LOADED_FIRST = [
    "lightning.pytorch",
    "lightning.pytorch.loggers.wandb",
    "torchmetrics",
    "fbgemm_gpu",
    "torch.distributed.fsdp",
    "torchrec.distributed.train_pipeline",
    "torchrec.distributed.planner",
    "torch.distributed.pipelining",
]
FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "ddp_tuned": ({}, False),
    "torchrec_sharded": ({"convert_embeddings": "all"}, False),
    "torchrec_sharded, fails": ({"convert_embeddings": "all"}, True),
    "fsdp_tuned": ({"wrap": ["Linear"]}, False),
    "pipeline_parallel": ({"chain": "chain"}, False),
    "pipeline_parallel, fails": ({"chain": "chain"}, True),
}
"""Name of a strategy -> its options, and whether a step raises."""


class Attributes:
    """The functions, classes and methods of all of upstream's modules that are loaded; rank 0 alone
    looks for them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        if os.environ["RANK"] != "0":
            return
        for name, module in list(sys.modules.items()):
            if f"{name}.".startswith(UPSTREAM) and isinstance(module, ModuleType):
                self._add_module(name, module)
        dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
        self.values["torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers"] = dict(
            dispatcher._custom_op_handlers
        )

    def _add_module(self, name: str, module: ModuleType) -> None:
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                # torch wraps an optimizer's step when the first one is made.
                own_part = {
                    n: inspect.unwrap(v) if n == "step" else v for n, v in vars(value).items()
                }
                self.values |= {f"{name}.{key}.{n}": v for n, v in own_part.items() if _is_code(v)}
            if callable(value) or key == "dist":
                self.values[f"{name}.{key}"] = value

    def changes(self, later: "Attributes") -> list[str]:
        """Return the names of what has other values later."""
        common = self.values.keys() & later.values.keys()
        values = ((name, self.values[name], later.values[name]) for name in common)
        changed = (
            name for name, a, b in values if a is not b and not (isinstance(a, dict) and a == b)
        )
        return sorted([*changed, *(self.values.keys() - later.values.keys())])


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def objects_changed(trainer: Any) -> list[str]:
    """Return the objects of Lightning's in a trainer that have something of this package as an
    attribute or class."""
    objects, names = {"trainer": trainer}, []
    for path in (
        "fit_loop",
        "validate_loop",
        "profiler",
        "_checkpoint_connector",
        "_signal_connector",
    ):
        objects[path] = getattr(trainer, path)
    objects["epoch_loop"], objects["precision"] = (
        trainer.fit_loop.epoch_loop,
        trainer.precision_plugin,
    )
    objects["results"] = trainer.fit_loop.epoch_loop._results
    for path, value in objects.items():
        attributes = vars(value).items()
        names += [
            f"{path}.{n}"
            for n, v in attributes
            if _is_ours(type(v)) or (_is_code(v) and _is_ours(v))
        ]
        names += [f"class of {path}"] if _is_ours(type(value)) else []
    return names


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("lightning_distrec")


def main() -> None:
    """Fit under each strategy, well and with an exception, and print what has changed when."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank, GROUP_WORLD_SIZE="2")
    for name in LOADED_FIRST:
        importlib.import_module(name)
    initial = Attributes()
    package = importlib.import_module("lightning_distrec")
    result: dict[str, Any] = {"import": initial.changes(Attributes())}
    for name in package.__all__:
        getattr(package, name)
    result["all strategies"] = initial.changes(Attributes())
    loaded = Attributes()
    for fit, (options, fails) in FITS.items():
        result[fit] = _fit(package, fit.split(",")[0], options, fails, initial, loaded)
    if rank == "0":
        print(f"{RESULT}{json.dumps(result)}", flush=True)


def _fit(
    package: Any,
    name: str,
    options: dict[str, Any],
    fails: bool,
    initial: Attributes,
    loaded: Attributes,
) -> dict[str, Any]:
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    changes: list[str] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(64, 8)
            self.chain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, ids: Any, index: int) -> Any:
            if index == 1 and not changes:
                changes.extend(initial.changes(Attributes()))
                if fails:
                    raise ValueError("on every rank")
            loss = self.chain(self.table(ids)).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategies = (getattr(package, public_name) for public_name in package.__all__)
    strategy = next(value for value in strategies if getattr(value, "strategy_name", "") == name)
    trainer = pl.Trainer(
        strategy=strategy(**options), accelerator="cpu", devices=1, num_nodes=2, max_steps=3, logger=False,
        callbacks=[package.Communication()] if fails else [], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = DataLoader(torch.arange(48).reshape(12, 4) % 64, batch_size=4)
    message = ""
    try:
        trainer.fit(Module(), data)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return {
        "during": changes,
        "after": loaded.changes(Attributes()),
        "objects": objects_changed(trainer),
        "raised": message,
    }


if __name__ == "__main__":
    main()

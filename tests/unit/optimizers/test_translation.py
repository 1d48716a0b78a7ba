"""From the user's optimizers to each table's update: decisions, in one process. Numbers are in
test_parity.py."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import rewrite_groups
from lightning_distrec.optimizers.translation import translate


def decide(
    optimizer: type, mode: str = "auto", device: str = "cpu", later: str = "", **options: Any
) -> Any:
    """Return the update of one table in one optimizer."""
    table = nn.Parameter(torch.zeros(4, 8))
    return translate({"t": table}, {"t": mode}, [optimizer([table], **options)], device, later)["t"]


def test_fused_updates_are_given_every_hyperparameter() -> None:
    adagrad = decide(optim.Adagrad, lr=0.25, eps=1e-7, initial_accumulator_value=0.5)
    assert adagrad.kind == "fused"
    assert {k: v for k, v in adagrad.arguments.items() if k != "optimizer"} == {
        "learning_rate": 0.25,
        "eps": 1e-7,
    }
    assert adagrad.initial_state == 0.5
    rows = decide(RowWiseAdagrad, lr=0.25)
    assert (rows.kind, rows.needs_full_rows, rows.arguments["eps"]) == ("fused", True, 1e-10)
    assert decide(optim.SGD, lr=torch.tensor(0.5)).arguments["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("optimizer", "options", "obstacle"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, "FBGEMM's SGD has no momentum=0.9"),
        (optim.SGD, {"lr": 0.1, "maximize": True}, "FBGEMM's SGD has no maximize=True"),
        (optim.Adagrad, {"lr_decay": 0.1}, "FBGEMM's Adagrad has no lr_decay=0.1"),
        (optim.Adam, {}, "Adam moves rows that no id touched"),
    ],
)
def test_what_fbgemm_would_ignore_goes_dense_with_the_reason(
    optimizer: type, options: Any, obstacle: str
) -> None:
    update = decide(optimizer, **options)
    assert (update.kind, update.reason) == ("dense", obstacle)


def test_updates_that_must_wait_for_the_step_are_sparse_where_the_optimizer_can() -> None:
    for optimizer in (optim.SGD, optim.Adagrad):
        update = decide(optimizer, lr=0.1, later="gradient_clip_val=1.0")
        assert (update.kind, update.reason) == ("sparse", "gradient_clip_val=1.0")
        assert (
            decide(optimizer, lr=0.1, later="gradient_clip_val=1.0", mode="fused").kind == "fused"
        )
    rows = decide(RowWiseAdagrad, lr=0.1, later="manual optimization")
    assert (rows.kind, rows.needs_full_rows) == ("dense", True)
    assert rows.reason == "manual optimization; RowWiseAdagrad takes no sparse gradients"
    assert decide(optim.SGD, lr=0.1, fused=True, later="manual optimization").kind == "dense"
    assert decide(optim.Adam, later="manual optimization").reason == (
        "Adam moves rows that no id touched"
    )


def test_sparse_can_be_asked_for_where_it_is_exact() -> None:
    assert decide(optim.SparseAdam).kind == "sparse"
    assert decide(optim.Adagrad, mode="sparse").reason == "asked for"
    with pytest.raises(
        OptimizerError, match="embedding_update='sparse', but Adam moves rows that no id touched"
    ):
        decide(optim.Adam, mode="sparse")
    by_hand = decide(optim.SparseAdam, later="manual optimization; fused on request")
    assert (by_hand.kind, by_hand.reason) == ("sparse", "SparseAdam takes sparse gradients")
    with pytest.raises(
        OptimizerError, match="SparseAdam is not known. Set embedding_update='sparse'"
    ):
        decide(optim.SparseAdam, mode="fused")
    with pytest.raises(OptimizerError, match="SparseAdam needs sparse gradients"):
        decide(optim.SparseAdam, mode="dense")


def test_lazy_adam_is_for_cuda_and_on_request() -> None:
    update = decide(optim.AdamW, mode="fused_lazy", device="cuda", lr=0.1, weight_decay=0.01)
    assert (update.kind, update.arguments["weight_decay"]) == ("fused_lazy", 0.01)
    with pytest.raises(OptimizerError, match="no Adam on CPU"):
        decide(optim.Adam, mode="fused_lazy")
    with pytest.raises(OptimizerError, match="no L2 weight_decay"):
        decide(optim.Adam, mode="fused_lazy", device="cuda", weight_decay=0.01)


def test_frozen_tables_are_left_where_they_are() -> None:
    frozen, loose = (
        nn.Parameter(torch.zeros(4, 8), requires_grad=False),
        nn.Parameter(torch.zeros(4, 8)),
    )
    other = nn.Parameter(torch.zeros(1))
    modes = {"frozen": "auto", "loose": "auto"}
    updates = translate(
        {"frozen": frozen, "loose": loose}, modes, [optim.SGD([frozen, other], lr=0.1)], "cpu", ""
    )
    assert {name: (u.kind, u.reason) for name, u in updates.items()} == {
        "frozen": ("frozen", "requires_grad is False"),
        "loose": ("frozen", "in no optimizer"),
    }
    # it keeps its place in the group, in case it is unfrozen
    assert updates["frozen"].param_group is not None


def test_a_table_in_two_optimizers_is_reported() -> None:
    table = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(OptimizerError, match="table 't' is in two optimizers"):
        translate(
            {"t": table},
            {"t": "auto"},
            [optim.SGD([table], lr=0.1), optim.Adam([table])],
            "cpu",
            "",
        )


def test_unknown_optimizers_go_dense_only_when_asked_and_say_so() -> None:
    with pytest.raises(OptimizerError, match="Adafactor is not known"):
        decide(optim.Adafactor)
    assert decide(optim.Adafactor, mode="dense").reason == "asked for; not known to be exact"


def test_groups_keep_count_order_and_options_when_shards_take_the_tables_places() -> None:
    tables = {name: nn.Parameter(torch.zeros(4, 8)) for name in ("dense", "fused", "elsewhere")}
    first, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    optimizer = optim.Adagrad(
        [
            {"params": [first, tables["dense"], last], "lr": 0.5},
            {"params": [tables["fused"]], "lr": 0.25},
            {"params": [tables["elsewhere"], first.detach().requires_grad_()]},
        ],
        lr=0.1,
        initial_accumulator_value=0.5,
    )
    shard, second, empty = (
        nn.Parameter(torch.ones(2, 8)),
        nn.Parameter(torch.ones(2, 4)),
        nn.Parameter(torch.zeros(0)),
    )
    rewrite_groups([optimizer], tables, {"dense": [shard, second], "elsewhere": [empty]}, ())
    assert [[p.shape for p in group["params"]] for group in optimizer.param_groups] == [
        [(1,), (2, 8), (2, 4), (2,)],
        [],
        [(0,), (1,)],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.1]
    assert torch.equal(optimizer.state[shard]["sum"], torch.full((2, 8), 0.5))
    assert torch.equal(optimizer.state[second]["sum"], torch.full((2, 4), 0.5))
    assert not any(table in optimizer.state for table in tables.values())

"""TorchRec's own optimizer classes: seen through to torch's inside of them, or refused by name."""

from collections.abc import Iterable

from torch.optim import Optimizer
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from lightning_distrec._compat.lightning import skip_order_check
from lightning_distrec._compat.torchrec import wrapped_optimizer
from lightning_distrec.errors import OptimizerError

MARKERS = {
    "SGD": "torch.optim.SGD",
    "Adagrad": "torch.optim.Adagrad",
    "Adam": "torch.optim.Adam, which is exact; on a GPU embedding_update='fused_lazy' has FBGEMM's, of touched rows",
}
"""Classes of torchrec.optim that only name a kernel of FBGEMM -> what has its numbers in one process too."""
NO_EXACT_FORM = "RowWiseAdagrad, torch.optim.Adagrad or torch.optim.Adam; its kernel has no form in one process"
INSTEAD = {
    WarmupOptimizer: "return the optimizer inside of it with a torch.optim.lr_scheduler (LinearLR, LambdaLR, "
    "SequentialLR) at interval 'step'",
    GradientClippingOptimizer: "return the optimizer inside of it, and set gradient_clip_val and "
    "gradient_clip_algorithm in the Trainer",
}
"""Wrappers that do something else inside of `step` -> what Lightning has for it."""


def see_through(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers with torch's own in the place of each KeyedOptimizerWrapper, whose param groups it shares.

    A CombinedOptimizer of one is that one; of several it stays, and `members_of` returns those.
    Raises OptimizerError: a wrapper or a class that cannot be followed, with what to use instead.
    """
    return [_see_through(optimizer) for optimizer in optimizers]


def _see_through(optimizer: Optimizer) -> Optimizer:
    for member in [optimizer, *members_of([optimizer])]:
        refuse_marker(member, "configure_optimizers")
        for kind, way_out in INSTEAD.items():
            if isinstance(member, kind):
                raise OptimizerError(
                    f"configure_optimizers returned {kind.__name__}, which changes rates or gradients inside of "
                    f"`step`, where the tables' updates do not follow it. Instead {way_out}."
                )
    members = members_of([optimizer])
    if len(members) > 1 or members[0] is optimizer:
        return optimizer
    # A wrapper's `step` calls the other's, and is not called any more: torch's schedulers would warn of their order.
    skip_order_check(optimizer)
    return members[0]


def members_of(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return torch's optimizers in the place of TorchRec's KeyedOptimizerWrapper and CombinedOptimizer."""
    members: list[Optimizer] = []
    for optimizer in optimizers:
        if isinstance(optimizer, CombinedOptimizer):
            members += members_of(member for _, member in optimizer.optimizers)
        elif isinstance(optimizer, KeyedOptimizerWrapper):
            members += members_of([wrapped_optimizer(optimizer)])
        else:
            members.append(optimizer)
    return members


def refuse_marker(optimizer: Optimizer, source: str) -> None:
    """Raise OptimizerError where an optimizer only names a kernel of FBGEMM, and cannot step. source: who made it."""
    kind = type(optimizer)
    if kind.__module__ == "torchrec.optim.optimizers":
        raise OptimizerError(
            f"torchrec.optim.{kind.__name__} (by {source}) only names a kernel of FBGEMM, and no process can step it. "
            f"Use {MARKERS.get(kind.__name__, NO_EXACT_FORM)}."
        )

"""What is done to a rank's loss before backward: it is weighted by its share of examples, and
completed by zeros."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec._compat.torch import is_ddp_sink
from lightning_distrec.batches import named_leaves
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.ranks import Ranks

LossReduction = Literal["mean", "sum", "rank_mean"]


class LossWeight:
    """What this rank's loss is multiplied by, so that gradients are those of the mean over all
    ranks' examples.

    DDP averages the ranks' gradients, so that a rank with few examples counts as much as one with
    many: a mean of means. A run on one device has one mean over all examples.

    reduction: what the module's loss is over its batch. "mean": weight ranks by their number of
    examples. "sum": the gradients are those of the sum over all ranks. "rank_mean": leave it to
    DDP, a mean of the ranks' means.
    notify: called once where batches are unequal, with what is done about it.
    """

    def __init__(
        self, reduction: LossReduction, ranks: Ranks, notify: Callable[[str], None]
    ) -> None:
        self._reduction = reduction
        self._ranks = ranks
        self._notify = notify
        self._has_notified = False
        self._unequal: list[int] = []
        self._factor: float | None = None

    @property
    def warns_of_sizes(self) -> bool:
        """Whether batches of unequal sizes need a warning: nothing was reported of them, nor are
        they meant."""
        return self.counts_examples and not self._has_notified

    @property
    def counts_examples(self) -> bool:
        """Whether the ranks' numbers of examples matter."""
        return self._reduction == "mean" and self._ranks.num_ranks > 1

    def begin_step(self) -> None:
        """Forget the batch of the step before."""
        self._unequal = []
        self._factor = None

    def add_lookup(self, num_examples: int, smallest: int, largest: int) -> None:
        """Add the number of examples of a lookup: this rank's, and the minimum and maximum over
        ranks."""
        if smallest != largest:
            # All lookups of a step are compared: collections may be called with different numbers
            # of examples.
            self._unequal.append(num_examples)
            self._factor = None

    def add_ids(self, num_ids: int, smallest: int, largest: int) -> None:
        """Note once where ranks look up unequal numbers of ids, from which those of examples do not
        follow."""
        if smallest != largest and not self._has_notified and torch.is_grad_enabled():
            self._has_notified = True
            self._notify(
                f"torchrec_sharded: ranks look up unequal numbers of ids ({smallest:,} to "
                f"{largest:,}) in one step. If batches are of unequal size, gradients are the mean "
                "of the ranks' means, as under DDP. This is reported once: lookups of nn.Embedding "
                "do not show how many examples these are."
            )

    def factor(self) -> float:
        """Collective where batches are unequal, which all ranks know. Return what to multiply the
        loss by."""
        if self._reduction == "sum":
            # DDP divides by the number of ranks: times that number, gradients are sums.
            return float(self._ranks.num_ranks)
        if not self._unequal:
            return 1.0
        # Whether sizes are unequal came with the lookups' own exchange, so all ranks are here or
        # none is.
        if self._factor is None:
            self._factor = (
                self._share(self._ranks.all_gather(self._unequal)) * self._ranks.num_ranks
            )
        return self._factor

    def _share(self, unequal: list[list[int]]) -> float:
        """Return this rank's share of the examples. unequal: by rank, the numbers of examples of a
        step's lookups."""
        lookups = list(zip(*unequal, strict=True))
        reference = lookups[0]
        # Lookups agree where all ranks' numbers have one proportion, for 1 and 20 candidates per
        # example, for instance.
        agree = all(
            size * sum(reference) == reference_size * sum(sizes)
            for sizes in lookups
            for size, reference_size in zip(sizes, reference, strict=True)
        )
        if not self._has_notified:
            self._has_notified = True
            examples = ", ".join(
                str(sizes[0] if agree else sorted(set(sizes))) for sizes in unequal
            )
            self._notify(
                f"the ranks' batches have unequal numbers of examples ({examples}). Each rank's "
                "loss is weighted by its share, so that gradients are those of the mean over all "
                "examples. If your loss is a sum, or a mean over something else, set "
                "loss_reduction='sum' or 'rank_mean' (plain DDP). This is reported once."
                if agree
                else "the ranks' batches have unequal numbers of examples, and a step's lookups "
                f"disagree about them ({examples}). Gradients are the mean of the ranks' means, as "
                "under plain DDP. Set loss_reduction='rank_mean' if that is meant, or weight the "
                "loss yourself. This is reported once."
            )
        return (
            reference[self._ranks.rank] / sum(reference) if agree else 1.0 / self._ranks.num_ranks
        )


class BatchSizes:
    """Looks for batches of unequal sizes: in steps 1, 2, 4, 8 ..., and in the last one of each
    epoch.

    notify: called once on every rank, with what that means where nothing weighs the ranks' losses.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, notify: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._notify = notify
        self._is_done = ranks.num_ranks == 1
        self._num_steps = 0
        self._is_due = True
        self._last: list[int] = []
        """The number of the last step whose batch was looked at, and the sizes of its tensors."""

    def before_step(self, batch: Any) -> None:
        """Collective in the steps after those."""
        if self._is_done:
            return
        # Once the step has ended, in which lookups may have shown numbers of examples.
        if self._is_due:
            self.compare()
        self._num_steps += 1
        self._is_due = self._num_steps & (self._num_steps - 1) == 0
        # Ranks may not know alike that a batch is the last one: all compare it when the epoch ends.
        if self._is_due or self._trainer.is_last_batch:
            tensors = []
            for _, leaf in named_leaves(batch):
                if isinstance(leaf, Tensor) and leaf.dim():
                    tensors.append(leaf)
            self._last = [self._num_steps, *map(len, tensors)]

    def compare(self) -> None:
        """Collective. Compare the batch that was looked at last."""
        if self._is_done or not self._num_steps:
            return
        steps, *sizes = zip(*self._ranks.all_gather(self._last), strict=False)
        # Flat ids of bags are as many as there are, in batches of one size too: some tensor has a
        # row per example.
        if not sizes or len(set(steps)) > 1 or any(len(set(size)) == 1 for size in sizes):
            return
        self._is_done = True
        self._notify(
            f"the ranks' batches are of unequal sizes, {sizes[-1]} in step {steps[0]}, and no "
            "lookup shows numbers of examples by which losses could be weighted. Gradients are the "
            "mean of the ranks' means, as under plain DDP. For those of one process give each rank "
            "batches of one size (drop_last=True), or weight the loss yourself. This is reported "
            "once."
        )


Lookups = Callable[[], list[list[Tensor]]]
"""Returns the rows of each lookup of the running step that learns."""
ADVICE = "Return a loss of what the step computes, times 0: `(output * 0).sum()`."


def reaches_a_parameter(loss: Tensor) -> bool:
    """Return whether backward may give any parameter a gradient; looks no further than to the first
    sign of one."""
    nodes = [loss.grad_fn]
    seen = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        # AccumulateGrad nodes alone have a variable. What a Function's backward does, nobody sees:
        # tables are updated, rows are sent, and a reentrant checkpoint runs a backward of its own.
        is_function = isinstance(
            node, torch.autograd.function.BackwardCFunction
        ) and not is_ddp_sink(node)
        is_function |= "CppNode" in node.name()
        if is_function or isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        seen.add(node)
        for following, _ in node.next_functions:
            nodes.append(following)
    return False


class _Joined(torch.autograd.Function):
    """A loss whose backward reaches further tensors: parameters without a gradient, others with
    zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *reached: Tensor) -> Tensor:
        # Without a gradient DDP takes a parameter for unused, and sends zeros.
        ctx.zeros = [
            None if isinstance(tensor, nn.Parameter) else torch.zeros_like(tensor)
            for tensor in reached
        ]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, *ctx.zeros


def _sums_of_no_rows(rows: list[Tensor]) -> list[Tensor]:
    """Return tensors whose backward makes the exchange of a lookup, with zeros."""
    return [tensor[:0].sum() for tensor in rows]


class UnreachedLoss:
    """Completes losses that reach no parameter on this rank, as `torch.tensor(0.0,
    requires_grad=True)`.

    Backward would make no exchange, and the other ranks would wait. In one process such examples
    add nothing to the
    gradients: the rank takes part with zeros, in the order in which an earlier backward has
    completed gradients.

    layers: returns name -> parameter of the layers that DDP averages. lookups: see Lookups; None:
    there are no tables.
    """

    def __init__(
        self,
        layers: Callable[[], Mapping[str, nn.Parameter]],
        rank: int,
        lookups: Lookups | None = None,
    ) -> None:
        self._layers = layers
        self._rank = rank
        self._lookups = lookups
        self._order: list[Any] = []
        """Parameters, and numbers of lookups, as the first backward has completed their
        gradients."""
        self._num_lookups = -1  # not known yet
        self._handles: list[Any] = []
        self._has_warned = False

    def complete(self, loss: Tensor, model: Any) -> Tensor:
        """Return a loss whose backward makes this rank's exchanges; `loss` itself, if it reaches a
        parameter.

        Raises UnsupportedError: in which order is not known.
        """
        if self._handles:
            self._end_recording()
        if reaches_a_parameter(loss):
            if self._lookups is not None and self._num_lookups < 0:
                self._record(self._lookups())
            return loss
        groups = self._groups()
        if not self._has_warned:
            self._has_warned = True
            message = (
                "the loss reaches no parameter: this rank takes part in backward with zeros. Where "
                "that happens on all ranks in one step, parameters get gradients of 0, and one "
                "process would give them none (momentum and weight decay go on): set "
                "find_unused_parameters=True. This is reported once."
            )
            print(rank_prefixed_message(message, self._rank), flush=True)
        joined = torch.zeros((), device=loss.device, requires_grad=True)
        # autograd runs the youngest node that is ready: the first group is made last
        for group in reversed(groups):
            joined = _Joined.apply(joined, *group())
        joined = _Joined.apply(loss, joined)
        if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
            # again: in forward DDP has found no parameter in the loss
            prepare_for_backward(model, joined)
        return joined

    def refuse_missing_lookups(self, num_lookups: int) -> None:
        """Raise UnsupportedError: the step made fewer lookups than a step before it, where its loss
        reaches nothing.

        Called at the end of a step. num_lookups: those that it has made, and those that will be
        made for it.
        """
        if num_lookups < max(self._num_lookups, 1):
            self._refuse(num_lookups)

    def _refuse(self, num_lookups: int) -> NoReturn:
        raise UnsupportedError(
            f"the loss on rank {self._rank} reaches no parameter, and this step has {num_lookups} "
            f"lookups of sharded tables, where {max(self._num_lookups, 0)} are known from a step "
            f"before it: the other ranks would wait for this one. {ADVICE}"
        )

    def _groups(self) -> list[Callable[[], list[Tensor]]]:
        """Return what completes at the same time, in the order of backward."""
        if self._lookups is None:
            return [
                lambda: [
                    parameter for parameter in self._layers().values() if parameter.requires_grad
                ]
            ]
        lookups = self._lookups()
        if len(lookups) != self._num_lookups:
            self._refuse(len(lookups))
        groups: list[Callable[[], list[Tensor]]] = []
        for entry in self._order:
            if isinstance(entry, int):
                groups.append(partial(_sums_of_no_rows, lookups[entry]))
            elif entry.requires_grad:
                groups.append(partial(list, [entry]))
        return groups

    def _record(self, lookups: list[list[Tensor]]) -> None:
        """Note in which order the backward that begins now completes gradients."""
        self._num_lookups = len(lookups)
        completed = self._order
        for parameter in self._layers().values():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(completed.append))
        for number, rows in enumerate(lookups):
            for tensor in rows:
                self._handles.append(
                    tensor.register_hook(lambda _, number=number: completed.append(number))
                )

    def _end_recording(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # What is not used in a step of DDP without find_unused_parameters has no place: it is taken
        # last.
        places = {}
        for entry in reversed(self._order):
            places[id(entry) if isinstance(entry, Tensor) else entry] = entry
        unused = [p for p in self._layers().values() if id(p) not in places]
        numbers = [number for number in range(self._num_lookups) if number not in places]
        self._order = [*reversed(list(places.values())), *unused, *numbers]

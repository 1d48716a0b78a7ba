"""What must be alike on all ranks: numbers of param groups, compared in every step, and weights,
now and then.

Ranks whose learning rates or replicas differ train models of their own, of which a checkpoint would
keep rank 0's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distrec.errors import OptimizerError
from lightning_distrec.gpu import HostCopy
from lightning_distrec.optimizers.step_hooks import collect_parameters
from lightning_distrec.ranks import number_for

LONGEST_INTERVAL = 100
"""Steps between two comparisons of weights; they are compared after 1, 2, 4, 8 ... steps too."""
TOLERANCE = 1e-5
"""Largest difference of a weight's projection, relative to its norm; on identical machines it is
0."""


class ReplicatedState:
    """Compares the param groups and replicas of one fit, a Run, over the ranks."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._ranks = run.session.consensus
        self._flags = self._ranks.flags
        self.trained: set[int] = set()
        """Ids of the parameters whose gradients are exchanged, and of shards."""
        self._checked = (-1, -1)
        self._num_steps = 0
        self._projections: tuple[list[str], HostCopy] | None = None

    def before_step(self) -> None:
        """Collective after 1, 2, 4 ... steps, and every 100. Raise OptimizerError where ranks have
        drifted apart.

        Also raises it where an optimizer has a parameter that each rank would train by itself.
        """
        if self._ranks.num_ranks == 1:
            return
        if self._flags.differs:
            self.compare_numbers()
        groups = self._groups()
        # A count is cheap in every step, and changes where add_param_group is called.
        moment = self._run.trainer.current_epoch, sum([len(group["params"]) for group in groups])
        if moment != self._checked:
            self._checked = moment
            self._refuse_untrained()
        # It travels with the messages of the step: one of its own would cost a round trip.
        self._flags.compared = hash(tuple([number for _, _, number in group_numbers(groups)]))
        if self._projections is not None:
            self._compare_weights()
        steps = self._num_steps
        self._num_steps = self._num_steps + 1
        # At powers of two: drift shows early. Alike on all ranks by the count.
        if steps and (steps & (steps - 1) == 0 or steps % LONGEST_INTERVAL == 0):
            self._project_weights()
        if steps == 1:
            # At once, though a GPU is waited for: DDP raises in this step where layers are unused,
            # and names none.
            self._compare_weights()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._run.optimizers() for group in optimizer.param_groups]

    def compare_numbers(self) -> None:
        """Collective where ranks have learned that they differ. Raise OptimizerError with the
        number that does."""
        if not self._flags.differs:
            return
        self._flags.differs = False
        numbers: dict[str, tuple[float, float]] = {}
        for place, key, number in group_numbers(self._groups()):
            numbers[f"'{key}' of param group {place} (number {len(numbers)})"] = number, 0.0
        numbers["how many numbers param groups have"] = len(numbers), 0.0
        self._refuse_differing(
            numbers,
            "ReduceLROnPlateau or a callback that follows what each rank logs by itself (set "
            "sync_dist=True in self.log), a scheduler that is stepped or a rate that is set under "
            "is_global_zero, a rate of a rank's own loss or random numbers, or an optimizer that "
            "a callback has replaced.",
        )

    def _refuse_untrained(self) -> None:
        for parameter in collect_parameters(self._run.optimizers()):
            is_trained = id(parameter) in self.trained or isinstance(parameter, DTensor)
            if parameter.requires_grad and not is_trained:
                names = {id(other): name for name, other in self._run.module.named_parameters()}
                raise OptimizerError(
                    f"an optimizer has '{names.get(id(parameter), 'a parameter')}' of shape "
                    f"{tuple(parameter.shape)}, which was not in the module at set-up: its "
                    "gradients would not be averaged, and each rank would train weights of its "
                    "own. Make all layers in __init__ or configure_model, as attributes, and "
                    "freeze those that train later; or end the fit, replace the layer, and call "
                    "fit again."
                )

    @torch.no_grad()
    def _project_weights(self) -> None:
        weights = self._run.replicas()
        for place, group in enumerate(self._groups()):
            # Numbers on a GPU, for which a step does not wait.
            for key, value in group.items():
                if isinstance(value, Tensor):
                    weights[f"{key} of group {place}"] = value
        numbers = list(map(project, weights.values()))
        stacked = torch.stack(
            [number.to(numbers[0].device) for number in numbers] or [torch.empty(0)]
        )
        # Read in the next step: reading it now would make the host wait for a GPU.
        self._projections = list(weights), HostCopy(stacked.nan_to_num())

    def _compare_weights(self) -> None:
        """Collective. Raise OptimizerError where replicas of a weight differ."""
        if self._projections is None:
            return
        names, copy = self._projections
        self._projections = None
        numbers: Any = copy.read()
        local = number_for(names), number_for(numbers)
        digests = list(map(tuple, self._ranks.all_gather(local)))
        # Ranks of a stage, or with the same shards, have the same names, and so must have the same
        # numbers.
        if len(set(digests)) > len({digest for digest, _ in digests}):
            self._refuse_differing(
                {
                    f"a projection of '{name}'": pair
                    for name, pair in zip(names, numbers, strict=True)
                },
                "layers that the loss of a step does not use (set find_unused_parameters=True of "
                "the strategy), a norm over this rank's shards (clip with gradient_clip_val or "
                "self.clip_gradients), weights that are written on some ranks only, updates that "
                "depend on the rank, or loss.backward() in place of self.manual_backward.",
                self._unused_layers(),
            )

    def _unused_layers(self) -> str:
        """Return what to do about parameters that had no gradient in the step before; "" where all
        or none had one."""
        # The gradients are still there: Lightning sets them to None after the next training_step.
        learning = [
            (name, p.grad is None) for name, p in self._run.replicas().items() if p.requires_grad
        ]
        unused = [name for name, is_unused in learning if is_unused]
        if not unused or len(unused) == len(learning):
            return ""
        return (
            f"'{unused[0]}' has no gradient after the step. Where the loss does not use it, DDP "
            "averages no gradient of its bucket: set find_unused_parameters=True of the strategy, "
            "or freeze the layer. Seen by this: "
        )

    def _refuse_differing(
        self, numbers: Mapping[str, tuple[float, float]], causes: str, advice: str = ""
    ) -> None:
        """Collective. numbers: by name, each with its size; ranks may lack some."""
        first: dict[str, tuple[int, float]] = {}
        for rank, remote_numbers in enumerate(self._ranks.all_gather(numbers)):
            for name, (number, size) in remote_numbers.items():
                first_rank, first_number = first.setdefault(name, (rank, number))
                if abs(number - first_number) > TOLERANCE * size:
                    raise OptimizerError(
                        f"{advice}{name} is no longer the same on all ranks after "
                        f"{self._num_steps - 1} steps: it is {first_number:.7g} on rank "
                        f"{first_rank} and {number:.7g} on rank {rank}. Causes: {causes}"
                    )


def group_numbers(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, float]]:
    """Return the plain numbers of param groups, and those in tuples, each with its group's place
    and its key."""
    # One list, not a generator for each group, of which each number is a call in every step.
    numbers: list[tuple[int, str, float]] = []
    for place, group in enumerate(groups):
        for key, value in group.items():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, (int, float)):
                    numbers.append((place, key, part))
    return numbers


def project(weight: Tensor) -> Tensor:
    """Return a weight's projection on a fixed direction, on which differences do not cancel, and
    its norm: (2,)."""
    values = torch.view_as_real(weight) if weight.is_complex() else weight
    matrix = (values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)).float()
    # The product of a direction for rows and one for columns: one as large as the weight would
    # double its memory.
    rows, columns = (_direction(size, weight.device) for size in matrix.shape)
    return torch.stack([rows @ matrix @ columns, matrix.norm()])


def _direction(size: int, device: torch.device) -> Tensor:
    """Return pseudo-random numbers, alike on all ranks and made on the device: (size,)."""
    return torch.arange(1, size + 1, dtype=torch.float64, device=device).square().sin().float()

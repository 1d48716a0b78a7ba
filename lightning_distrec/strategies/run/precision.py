"""What the Trainer's precision plugin does, over gradients of which each rank has its shards
only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec._compat.lightning import unscales_in_step
from lightning_distrec._compat.patches import Patches
from lightning_distrec._compat.torch import watch_total_norm
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.optimizers.clipping import clip_by_norm, clip_by_value
from lightning_distrec.optimizers.step_hooks import collect_parameters
from lightning_distrec.optimizers.updates_in_backward import refuse_clip
from lightning_distrec.sharding.weights.shard_access import without_guard, without_guards

OUTPUT_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": None,
    "16-mixed": None,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
"""Precision -> dtype of the looked up rows; None: float32. Tables stay float32 in all of them."""


def output_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of the looked up rows. Raises UnsupportedError: FBGEMM's kernels lack this
    precision."""
    if precision not in OUTPUT_DTYPES:
        reason = (
            "FBGEMM has no float64 tables"
            if precision == "64-true"
            else "it was not measured over sharded tables"
        )
        raise UnsupportedError(
            f"Trainer(precision={precision!r}): {reason}. Use one of "
            f"{', '.join(map(repr, OUTPUT_DTYPES))}."
        )
    return OUTPUT_DTYPES[precision]


class _JointScaler(ShardedGradScaler):
    """Unscales gradients of further optimizers, which step where the one that it is called with
    does."""

    joint_optimizers: Sequence[Optimizer] = ()

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        with without_guard(), _joint_gradients(optimizer, self.joint_optimizers):
            super().unscale_(optimizer)


@contextmanager
def _joint_gradients(optimizer: Optimizer, joint_optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside of the context an optimizer has the parameters of the others too, and shards in the
    place of DTensors."""
    groups = optimizer.param_groups
    parameters = collect_parameters([optimizer, *joint_optimizers])
    # One list of plain tensors: torch's kernel takes none of both kinds. Of a DTensor this rank's
    # shard of the gradient, which is unscaled in place.
    local: list[Any] = []
    for p in parameters:
        gradient: Any = p.grad
        is_shard = isinstance(gradient, DTensor)
        local.append(SimpleNamespace(grad=gradient.to_local()) if is_shard else p)
    optimizer.param_groups = [{"params": local}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def skip_overflows_on_all_ranks(
    plugin: Precision, optimizers: list[Optimizer], joint_optimizers: Sequence[Optimizer] = ()
) -> Callable[[], None]:
    """Let all ranks skip a step when the gradients of any rank, shards included, are not finite;
    returns an undo.

    joint_optimizers: those that step together with the one in `optimizers`.
    Raises UnsupportedError: a scaler or an optimizer looks at the gradients of its own rank only.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return lambda: None
    if isinstance(scaler, ShardedGradScaler):
        patches = Patches()
        patches.replace(scaler, "unscale_", without_guards(scaler.unscale_))
        return patches.close
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise UnsupportedError(
            f"the loss scaler {type(scaler).__name__} looks for overflows on its own rank only. "
            "Use torch.amp.GradScaler, or "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
        )
    for optimizer in [*optimizers, *joint_optimizers]:
        if unscales_in_step(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__}(fused=True) looks for overflows by itself, on its own "
                "rank only. Remove fused=True, or use precision='bf16-mixed'."
            )
    # The scale begins where the user's scaler is, and goes back to it: later runs continue with
    # that.
    plugin.scaler = _JointScaler(  # type: ignore[attr-defined]
        torch.device(plugin.device).type,  # type: ignore[attr-defined]
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        process_group=dist.group.WORLD,
    )
    plugin.scaler.joint_optimizers = joint_optimizers  # type: ignore[attr-defined]

    def restore() -> None:
        scaler.load_state_dict(plugin.scaler.state_dict())  # type: ignore[attr-defined]
        plugin.scaler = scaler  # type: ignore[attr-defined]

    return restore if scaler.is_enabled() else lambda: None


def clip_over_all_ranks(
    plugin: Precision,
    shards: Callable[[], list[nn.Parameter]] | None,
    fused: Mapping[int, str],
    joint_optimizers: Sequence[Optimizer] = (),
    num_replicas: int = 1,
) -> Patches:
    """Let a plugin's `clip_gradients` clip by the norm over the shards of all ranks.

    shards: returns the parameters that only this rank has, and for which
    torch.nn.utils.clip_grad_norm_ is refused from now on; None: all shards are DTensors, which that
    function knows. fused: id of a weight that cannot be clipped -> its table. joint_optimizers:
    step, and are clipped by one norm, with any other. num_replicas: ranks with each shard.
    """

    def parameters_to_clip(optimizer: Any, clip_val: float) -> list[nn.Parameter]:
        parameters = [*plugin.main_params(optimizer), *collect_parameters(joint_optimizers)]
        refuse_clip(
            clip_val, [fused[id(parameter)] for parameter in parameters if id(parameter) in fused]
        )
        return parameters

    @without_guards
    def clip_norm(optimizer: Any, clip_val: float) -> None:
        parameters = parameters_to_clip(optimizer, clip_val)
        # None: no rank has parameters of its own, so that no all-reduce is made for them.
        sharded = None if shards is None else set(map(id, shards()))
        clip_by_norm(parameters, sharded, float(clip_val), num_replicas)

    @without_guards
    def clip_values(optimizer: Any, clip_val: float) -> None:
        clip_by_value(parameters_to_clip(optimizer, clip_val), float(clip_val))

    @without_guards
    def refuse_shards(gradients: list[torch.Tensor]) -> None:
        clipped = set(map(id, gradients))
        shard_gradients = []
        for shard in shards() if shards else []:
            if shard.grad is not None:
                shard_gradients.append(shard.grad)
        # User code gets guarded views of shards' gradients.
        if any(id(gradient) in clipped for gradient in shard_gradients) or any(
            hasattr(g, "place") for g in gradients
        ):
            raise UnsupportedError(
                "torch.nn.utils.clip_grad_norm_ was called with gradients of which this rank has "
                "its shards only, so that ranks would clip by different norms. Use "
                "Trainer(gradient_clip_val=...) or self.clip_gradients."
            )

    # On the instance: the plugin is the user's choice, and its class serves other trainers too.
    patches = Patches() if shards is None else watch_total_norm(refuse_shards)
    patches.replace(plugin, "clip_grad_by_norm", clip_norm)
    patches.replace(plugin, "clip_grad_by_value", clip_values)
    return patches

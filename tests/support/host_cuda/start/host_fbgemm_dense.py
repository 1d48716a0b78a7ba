"""FBGEMM's operators whose gradients its CPU wheel makes for the CPU alone, in a reference form.

They are the lookup whose rows get a gradient, and the permutation of pooled columns.
"""

from typing import Any

import host_fbgemm
import torch
from torch import Tensor


def _gradient(
    weights: list[Tensor],
    bags: list[Tensor],
    locations: Tensor,
    per_id: Tensor | None,
    trained: Tensor | None,
    gradient: Tensor,
    numbers: list[int],
) -> Tensor:
    """Return the gradient of all rows; trained: (num_features,), 0 for features whose rows get
    none."""
    pooling, max_dim = numbers
    result, rows = torch.zeros_like(weights[0]), host_fbgemm.Rows(weights, locations)
    for feature in host_fbgemm.features(bags, pooling, max_dim):
        if trained is not None and not trained[feature.number]:
            continue
        grads = gradient.reshape(-1)[feature.columns()].float()[feature.bags]
        grads *= host_fbgemm.factors(feature, pooling, per_id)[:, None]
        table = host_fbgemm.table_at([result], rows.place(feature), feature.dim)
        table.index_add_(0, feature.ids, grads.to(table.dtype))
    return result


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, per_id: Tensor | None, call: dict[str, Any]) -> Tensor:
        ctx.call, ctx.per_id = call, per_id
        nowhere = rows.new_empty(0)
        places = torch.zeros_like(call["weights_offsets"])
        ctx.weights = [rows.detach(), nowhere, places, call["weights_offsets"], nowhere]
        ctx.bags = [call["indices"], call["offsets"].long(), call["D_offsets"]]
        pooling, max_dim = call["pooling_mode"], int(call["max_D"])
        size = (len(call["offsets"]) - 1) // (len(call["D_offsets"]) - 1)
        shape = (
            [len(call["indices"]), max_dim]
            if pooling == host_fbgemm.NONE
            else [size, int(call["total_D"])]
        )
        if call["B_offsets"] is not None:
            names = (
                "B_offsets",
                "vbe_output_offsets_feature_rank",
                "vbe_B_offsets_rank_per_feature",
            )
            ctx.bags += [call[name] for name in names]
            shape = [int(call["vbe_output_size"])]
        ctx.locations = torch.empty(0, dtype=torch.int32, device=rows.device)
        ctx.numbers = [pooling, max_dim]
        numbers = [*ctx.numbers, call["output_dtype"], *shape]
        return torch.ops.host_cuda.look_up(ctx.weights, ctx.bags, ctx.locations, per_id, numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        places, trained = (ctx.weights, ctx.bags, ctx.locations), ctx.call["feature_requires_grad"]
        per_id = None
        if ctx.needs_input_grad[1]:
            per_id = torch.ops.host_cuda.per_id_gradient(*places, gradients[0], ctx.numbers).to(
                ctx.per_id.dtype
            )
        rows = torch.ops.host_cuda.row_gradient(
            *places, ctx.per_id, trained, gradients[0], ctx.numbers
        )
        return rows, per_id, None


def _columns(offsets: Tensor, order: Tensor) -> Tensor:
    """Return which columns a permutation takes. offsets: where each feature's begin; order: which
    features."""
    ranges = [
        torch.arange(int(offsets[feature]), int(offsets[feature + 1])) for feature in order.tolist()
    ]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def _permute(pooled: Tensor, offsets: Tensor, order: Tensor, *_: Tensor) -> Tensor:
    return pooled.index_select(1, torch.ops.host_cuda.columns(offsets, order))


def install() -> None:
    """Give FBGEMM, whose operators are loaded, the lookup and the permutation."""
    own = torch.library.Library("host_cuda", "FRAGMENT")
    own.define("columns(Tensor offsets, Tensor order) -> Tensor")
    own.impl("columns", _columns, "CPU")
    own.define(
        "row_gradient(Tensor[] weights, Tensor[] bags, Tensor locations, Tensor? per_id, Tensor? "
        "trained, "
        "Tensor gradient, int[] numbers) -> Tensor"
    )
    own.impl("row_gradient", _gradient, "CPU")
    name = "dense_embedding_codegen_lookup_function"
    arguments = getattr(torch.ops.fbgemm, name).default._schema.arguments

    def look_up(*args: Any, **kwargs: Any) -> Tensor:
        names = [argument.name for argument in arguments]
        call = {argument.name: argument.default_value for argument in arguments}
        call |= dict(zip(names, args, strict=False)) | kwargs
        return _Lookup.apply(call["dev_weights"], call["indice_weights"], call)

    fbgemm = torch.library.Library("fbgemm", "IMPL")
    fbgemm.impl(name, look_up, "AutogradCUDA")
    fbgemm.impl("permute_pooled_embs_auto_grad_split", _permute, "AutogradCUDA")
    host_fbgemm.libraries.extend([own, fbgemm])

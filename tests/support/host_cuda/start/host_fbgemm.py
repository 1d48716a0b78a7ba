"""FBGEMM's CUDA kernels in a reference form: what its CPU wheel lacks. Adam, LAMB, rows on the
host, a cache of them.

A lookup whose rows are all on the device, by an optimizer that the CPU wheel has, runs by that
wheel's own kernels. Each operator of this file runs on the CPU over the same memory; the device's
fallback follows what it reads and writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import host_fbgemm_cache
import torch
from torch import Tensor

DEVICE, MANAGED, MANAGED_CACHING = 0, 1, 2
"""Where rows are: fbgemm's EmbeddingLocation."""
DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
"""Of outputs: fbgemm's SparseType."""
MEAN, NONE = 1, 2
"""How rows are pooled: fbgemm's PoolingMode; 0 is a sum."""
HAS_KERNEL = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers of the CPU wheel."""

libraries: list[Any] = []


# ---- what an update is


def _sgd(
    rows: Tensor, grads: Tensor, states: list[Tensor], rate: float, options: list[float], step: int
) -> None:
    rows -= rate * grads


def _adagrad(
    rows: Tensor, grads: Tensor, states: list[Tensor], rate: float, options: list[float], step: int
) -> None:
    states[0] += grads.square()
    rows -= rate * grads / (states[0].sqrt() + options[0])


def _rowwise_adagrad(
    rows: Tensor, grads: Tensor, states: list[Tensor], rate: float, options: list[float], step: int
) -> None:
    states[0] += grads.square().mean(1, keepdim=True)
    rows -= rate * grads / (states[0].sqrt() + options[0])


def _direction(grads: Tensor, states: list[Tensor], options: list[float], step: int) -> Tensor:
    """Return Adam's, without the rate."""
    eps, beta1, beta2, _ = options
    states[0].lerp_(grads, 1 - beta1)
    states[1].mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    average = states[0] / (1 - beta1**step)
    return average / ((states[1] / (1 - beta2**step)).sqrt() + eps)


def _adam(
    rows: Tensor, grads: Tensor, states: list[Tensor], rate: float, options: list[float], step: int
) -> None:
    rows -= rate * (_direction(grads, states, options, step) + options[3] * rows)


def _lamb(
    rows: Tensor, grads: Tensor, states: list[Tensor], rate: float, options: list[float], step: int
) -> None:
    change = _direction(grads, states, options, step) + options[3] * rows
    rows -= rate * rows.norm(dim=1, keepdim=True) / change.norm(dim=1, keepdim=True) * change


UPDATES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "lamb": _lamb,
}
"""Optimizer -> what it does to rows that were looked up, of which each is there once."""
ROWWISE_STATES = {"rowwise_adagrad": (True,)}


# ---- lookups


@dataclass
class Feature:
    """The ids of one feature, and where their bags are in the output, which is seen as flat."""

    number: int
    ids: Tensor
    first: int
    """Of the call's ids."""
    bags: Tensor
    """(num_ids,): the bag of each id."""
    lengths: Tensor
    outputs: Tensor
    """(num_bags,): where each bag's values begin."""
    dim: int

    def columns(self) -> Tensor:
        """Return (num_bags, dim): where each value of the output is."""
        return self.outputs[:, None] + torch.arange(self.dim)


def features(bags: list[Tensor], pooling: int, max_dim: int) -> Iterator[Feature]:
    """bags: ids, offsets, columns where features begin, and three tensors of variable batches, else
    none."""
    ids, offsets, columns, *variable = bags
    num_features = len(columns) - 1
    size = (len(offsets) - 1) // num_features
    for number in range(num_features):
        dim = int(columns[number + 1] - columns[number])
        begin, end = number * size, (number + 1) * size
        if variable:
            begin, end = int(variable[0][number]), int(variable[0][number + 1])
        first, last = int(offsets[begin]), int(offsets[end])
        lengths = offsets[begin + 1 : end + 1] - offsets[begin:end]
        bag_of_id = torch.repeat_interleave(torch.arange(end - begin), lengths)
        if pooling == NONE:
            lengths, bag_of_id = (
                torch.ones(last - first, dtype=torch.int64),
                torch.arange(last - first),
            )
            outputs = (first + bag_of_id) * max_dim
        elif variable:
            outputs = _variable_outputs(number, num_features, dim, variable[1], variable[2])
        else:
            outputs = torch.arange(size) * int(columns[-1]) + int(columns[number])
        yield Feature(number, ids[first:last], first, bag_of_id, lengths, outputs, dim)


def _variable_outputs(
    number: int, num_features: int, dim: int, begins: Tensor, sizes: Tensor
) -> Tensor:
    """Return where bags begin: the output has them by rank, then by feature."""
    parts = [
        int(begins[rank * num_features + number]) + torch.arange(int(end - begin)) * dim
        for rank, (begin, end) in enumerate(zip(sizes[number][:-1], sizes[number][1:], strict=True))
    ]
    return torch.cat(parts)


@dataclass
class Rows:
    """Rows of one table, wherever they are."""

    weights: list[Tensor]
    """On the device, on the host, which places these are of which feature, where they begin there,
    and the cache."""
    locations: Tensor
    """(num_ids,): the slot in the cache of each id of the call, -1: in none."""

    def place(self, feature: Feature) -> tuple[int, int]:
        """Return where the feature's table is: its place, and its beginning there."""
        return int(self.weights[2][feature.number]), int(self.weights[3][feature.number])

    def slots(self, feature: Feature) -> Tensor:
        """Return the feature's ids' slots."""
        if len(self.locations) and self.place(feature)[0] == MANAGED_CACHING:
            return self.locations[feature.first : feature.first + len(feature.ids)].long()
        return torch.full_like(feature.ids, -1)

    def read(self, place: tuple[int, int], ids: Tensor, slots: Tensor, dim: int) -> Tensor:
        """Return a copy of rows."""
        weights = table_at(self.weights, place, dim)[ids].float()
        is_cached = slots >= 0
        if is_cached.any():
            weights[is_cached] = self.weights[4][slots[is_cached], :dim].float()
        return weights

    def write(self, place: tuple[int, int], ids: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Put rows where they were read."""
        is_cached, dim = slots >= 0, rows.shape[1]
        table, cache = table_at(self.weights, place, dim), self.weights[4]
        table[ids[~is_cached]] = rows[~is_cached].to(table.dtype)
        if is_cached.any():
            cache[slots[is_cached], :dim] = rows[is_cached].to(cache.dtype)


def table_at(tensors: list[Tensor], place: tuple[int, int], dim: int) -> Tensor:
    """Return the rows that begin at a place, and all that come after them there. tensors: device's,
    host's."""
    flat = tensors[0 if place[0] == DEVICE else 1].flatten()[place[1] :]
    return flat[: len(flat) // dim * dim].view(-1, dim)


def _look_up(
    weights: list[Tensor],
    bags: list[Tensor],
    locations: Tensor,
    per_id: Tensor | None,
    numbers: list[int],
) -> Tensor:
    pooling, max_dim, dtype, *shape = numbers
    rows, result = Rows(weights, locations), torch.zeros(shape, dtype=torch.float32)
    for feature in features(bags, pooling, max_dim):
        looked_up = rows.read(rows.place(feature), feature.ids, rows.slots(feature), feature.dim)
        looked_up *= factors(feature, pooling, per_id)[:, None]
        pooled = torch.zeros(len(feature.lengths), feature.dim, dtype=torch.float32).index_add_(
            0, feature.bags, looked_up
        )
        result.view(-1)[feature.columns()] = pooled
    return result.to(DTYPES[dtype])


def factors(feature: Feature, pooling: int, per_id: Tensor | None) -> Tensor:
    """Return what each id's row counts in its bag."""
    counts = torch.ones(len(feature.ids), dtype=torch.float32)
    if per_id is not None:
        counts = per_id[feature.first :][: len(feature.ids)].float()
    return counts / feature.lengths[feature.bags] if pooling == MEAN else counts


def _update(
    name: str,
    weights: list[Tensor],
    state1: list[Tensor],
    state2: list[Tensor],
    bags: list[Tensor],
    locations: Tensor,
    per_id: Tensor | None,
    gradient: Tensor,
    numbers: list[int],
    options: list[float],
) -> None:
    """Update each row once, by the sum of its gradients; numbers end with the step, options with
    the rate."""
    pooling, max_dim, step, are_unique = numbers
    # By id of the call; or, where rows are fetched ahead, by row: of the tables in their order,
    # each once.
    rows, num_seen = Rows(weights, locations[:0] if are_unique else locations), 0
    parts: dict[tuple[int, int], list[tuple[int, Tensor, Tensor, Tensor]]] = {}
    for feature in features(bags, pooling, max_dim):
        grads = gradient.reshape(-1)[feature.columns()].float()[feature.bags]
        grads *= factors(feature, pooling, per_id)[:, None]
        part = feature.number, feature.ids, rows.slots(feature), grads
        parts.setdefault(rows.place(feature), []).append(part)
    is_rowwise = ROWWISE_STATES.get(name, (False, False))
    for place, of_table in sorted(parts.items()):
        number = of_table[0][0]
        all_ids, all_slots, all_grads = (
            torch.cat([part[i] for part in of_table]) for i in (1, 2, 3)
        )
        ids, inverse = all_ids.unique(return_inverse=True)
        dim = all_grads.shape[1]
        grads = torch.zeros(len(ids), dim, dtype=torch.float32).index_add_(0, inverse, all_grads)
        slots = torch.empty_like(ids).scatter_(0, inverse, all_slots)
        if are_unique and place[0] == MANAGED_CACHING:
            slots = locations[num_seen : num_seen + len(ids)].long()
            num_seen += len(ids)
        tables = [
            table_at(state, (int(state[2][number]), int(state[3][number])), 1 if by_row else dim)
            for state, by_row in zip((state1, state2), is_rowwise, strict=False)
            if state
        ]
        values, states = rows.read(place, ids, slots, dim), [table[ids] for table in tables]
        UPDATES[name](values, grads, states, options[-1], options[:-1], step)
        rows.write(place, ids, slots, values)
        for table, state in zip(tables, states, strict=True):
            table[ids] = state


def _per_id_gradient(
    weights: list[Tensor],
    bags: list[Tensor],
    locations: Tensor,
    gradient: Tensor,
    numbers: list[int],
) -> Tensor:
    pooling, max_dim = numbers
    rows, result = Rows(weights, locations), torch.zeros(len(bags[0]), dtype=torch.float32)
    for feature in features(bags, pooling, max_dim):
        looked_up = rows.read(rows.place(feature), feature.ids, rows.slots(feature), feature.dim)
        grads = gradient.reshape(-1)[feature.columns()].float()[feature.bags]
        products = (looked_up * grads).sum(1)
        result[feature.first : feature.first + len(feature.ids)] = products * factors(
            feature, pooling, None
        )
    return result


class _Lookup(torch.autograd.Function):
    """Looks up in forward, and updates in backward."""

    @staticmethod
    def forward(
        ctx: Any, placeholder: Tensor, per_id: Tensor | None, name: str, call: dict[str, Any]
    ) -> Tensor:
        ctx.call, ctx.name, ctx.per_id = call, name, per_id
        ctx.bags = [call["indices"], call["offsets"].long(), call["D_offsets"]]
        pooling, max_dim, aux = call["pooling_mode"], int(call["max_D"]), call["aux_tensor"]
        size = (len(call["offsets"]) - 1) // (len(call["D_offsets"]) - 1)
        shape = [len(call["indices"]), max_dim] if pooling == NONE else [size, int(call["total_D"])]
        if aux[0] is not None:
            ctx.bags += aux[:3]
            shape = [int(call["vbe_output_size"])]
        empty = torch.empty(0, dtype=torch.int32, device=call["indices"].device)
        ctx.locations = aux[3] if aux[3] is not None else empty
        ctx.numbers = [pooling, max_dim]
        numbers = [*ctx.numbers, call["output_dtype"], *shape]
        return torch.ops.host_cuda.look_up(
            call["weights"], ctx.bags, ctx.locations, per_id, numbers
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, per_id = ctx.call, ctx.per_id
        per_id_gradient, are_unique = None, call["aux_bool"][1]
        if ctx.needs_input_grad[1]:
            per_id_gradient = torch.ops.host_cuda.per_id_gradient(
                call["weights"], ctx.bags, ctx.locations, gradients[0], ctx.numbers
            ).to(per_id.dtype)
        options = [*call.get("optim_float", []), float(call["learning_rate_tensor"])]
        torch.ops.host_cuda.update(
            ctx.name,
            call["weights"],
            call.get("momentum1") or [],
            call.get("momentum2") or [],
            ctx.bags,
            ctx.locations,
            per_id,
            gradients[0],
            [*ctx.numbers, call["aux_int"][0], are_unique],
            options,
        )
        return None, per_id_gradient, None, None


def _lookup_of(name: str) -> Any:
    operator = getattr(
        torch.ops.fbgemm, f"split_embedding_codegen_lookup_{name}_function_pt2"
    ).default
    arguments = operator._schema.arguments

    def look_up(*args: Any, **kwargs: Any) -> Tensor:
        names = [argument.name for argument in arguments]
        call = (
            {argument.name: argument.default_value for argument in arguments}
            | dict(zip(names, args, strict=False))
            | kwargs
        )
        _, host, _, _, _ = call["weights"]
        if name in HAS_KERNEL and not host.numel():
            return operator.redispatch(
                torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs
            )
        return _Lookup.apply(
            call["placeholder_autograd_tensor"], call["indice_weights"], name, call
        )

    return look_up


OPERATORS = {
    "look_up(Tensor[] weights, Tensor[] bags, Tensor locations, Tensor? per_id, int[] numbers) -> "
    "Tensor": _look_up,
    "update(str name, Tensor(a!)[] weights, Tensor(b!)[] state1, Tensor(c!)[] state2, Tensor[] "
    "bags, Tensor locations, "
    "Tensor? per_id, Tensor gradient, int[] numbers, float[] options) -> ()": _update,
    "per_id_gradient(Tensor[] weights, Tensor[] bags, Tensor locations, Tensor gradient, int[] "
    "numbers) "
    "-> Tensor": _per_id_gradient,
    **host_fbgemm_cache.OPERATORS,
}


def install() -> None:
    """Give FBGEMM, whose operators are loaded, what its CUDA wheel has."""
    own = torch.library.Library("host_cuda", "FRAGMENT")
    for schema, function in OPERATORS.items():
        own.define(schema)
        own.impl(schema.partition("(")[0], function, "CPU")
    fbgemm = torch.library.Library("fbgemm", "IMPL")
    for name in UPDATES:
        fbgemm.impl(
            f"split_embedding_codegen_lookup_{name}_function_pt2", _lookup_of(name), "AutogradCUDA"
        )
    for name, function in host_fbgemm_cache.KERNELS.items():
        fbgemm.impl(name, function, "CUDA")
    libraries.extend([own, fbgemm])

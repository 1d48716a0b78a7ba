"""The mapping of ids to rows in a module's state_dict: by rows, as the table itself, and readable
by torchrec's own.

Unsharded modules find the rows of ids that sharded ones have given by it: for serving, and for
calls after a run. Ids without a row of their own share one, as outside of training; none gets a
row.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec._compat.torchrec_modules import (
    BUCKETS,
    IDENTITIES,
    MCH_IDS,
    MCH_LOOKUPS,
    MCH_ROWS,
    MCH_SEGMENTS,
    METADATA,
    mch_state,
    set_mch_state,
)
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.sharding.mapping.id_mapping import IdMapping, mixed, probe
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import ANY_ID, MappingSpec, bucket_of

MADE_FOR = "ids_made_for"
"""Name of three numbers: lookups in training so far, buckets, and reserved rows of each."""
INITIAL = "ids_initial_rows"
SAVED_NAMES = ("ids", "ids_used", "ids_sights", "ids_newcomers", MADE_FOR, INITIAL)
"""All names, of a table whose option is ids: dynamic."""
AnyMapping = IdMapping | MchMapping
_OF_TORCHREC = {"ids": IDENTITIES, "used": METADATA}


def state_of(mapping: AnyMapping) -> dict[str, ChunkedTensor | Tensor]:
    """Return what is saved of this rank's part, by name; the tensors share its memory."""
    if isinstance(mapping, MchMapping):
        return mapping.state()
    spec = mapping.spec
    state: dict[str, ChunkedTensor | Tensor] = {}
    for name, rows in mapping.tensors.items():
        chunks = [Chunk((mapping.first_row, 0), rows)]
        state[_name(mapping, name)] = ChunkedTensor((spec.num_rows, 1), rows.dtype, chunks)
    if spec.managed:
        return state | {BUCKETS: torch.tensor([[spec.num_buckets]])}
    made_for = torch.tensor([mapping.num_lookups, spec.num_buckets, spec.num_reserved])
    return state | {MADE_FOR: made_for, INITIAL: mapping.initial_rows}


@torch.no_grad()
def load_into(mapping: IdMapping, name: str, value: Any) -> str:
    """Load this rank's part of an entry, of a full tensor or one in a file, and return what is
    wrong, or ""."""
    spec = mapping.spec
    if name in (BUCKETS, MADE_FOR):
        # torchrec's entry has the number of buckets alone; in ours, the number of lookups comes
        # first.
        numbers = _full(value).flatten().tolist()
        saved = numbers[-1 if spec.managed else 1 :]
        expected = [spec.num_buckets, spec.num_reserved][: len(numbers[-2:])]
        if saved != expected:
            return (
                f"the ids were mapped for {saved} buckets and reserved rows of each, and here they "
                f"are {expected}."
            )
        if not spec.managed:
            mapping.num_lookups = int(numbers[0])
            # No row waits for an optimizer in what was loaded.
            mapping.optimizer_stepped()
        return ""
    if name == INITIAL:
        initial = _full(value)
        if initial.shape != mapping.initial_rows.shape:
            return (
                f"rows start from {tuple(mapping.initial_rows.shape)}, but there are "
                f"{tuple(initial.shape)} to load."
            )
        mapping.initial_rows.copy_(initial)
        return ""
    (rows,) = [rows for key, rows in mapping.tensors.items() if _name(mapping, key) == name]
    if tuple(value.shape) != (spec.num_rows, 1):
        return (
            f"the table maps ids to {spec.num_rows} rows, but there are {tuple(value.shape)} to "
            "load."
        )
    if isinstance(value, Tensor):
        rows.copy_(value[mapping.first_row : mapping.first_row + mapping.num_rows])
    else:
        value.read_into([Chunk((mapping.first_row, 0), rows)])
    mapping.rows_were_set()
    return ""


def _full(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value.read()


def _name(mapping: IdMapping, name: str) -> str:
    return _OF_TORCHREC[name] if mapping.spec.managed else f"ids_{name}".replace("ids_ids", "ids")


class HoldsMappings(nn.Module):
    """A module with mappings in its state_dict."""

    mappings: Mapping[str, AnyMapping]
    """Prefix of their names in the module's state_dict -> the mapping."""

    def put_mappings(self, destination: dict[str, Any], prefix: str) -> None:
        """Add the state of the mappings to a state_dict."""
        for table, mapping in self.mappings.items():
            for name, value in state_of(mapping).items():
                destination[f"{prefix}{table}{name}"] = value

    def load_mappings(
        self, state: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]
    ) -> None:
        """Load the mappings from a state_dict; note what it lacks, and what does not fit."""
        for table, mapping in self.mappings.items():
            absent, problems = _load_mapping(mapping, state, prefix + table)
            missing += absent
            errors += problems


def _load_mapping(mapping: AnyMapping, state: Any, prefix: str) -> tuple[list[str], list[str]]:
    """Return what a state_dict lacks, and what in it does not fit."""
    keys = {name: prefix + name for name in state_of(mapping)}
    entries = {name: state[key] for name, key in keys.items() if key in state}
    if not isinstance(mapping, MchMapping):
        problems = {name: load_into(mapping, name, value) for name, value in entries.items()}
    else:
        problems = {"": mapping.load(entries) if len(entries) == len(keys) else ""}
    errors = [f"{prefix}{name}: {problem}" for name, problem in problems.items() if problem]
    return [key for name, key in keys.items() if name not in entries], errors


def _held_below(root: nn.Module) -> Iterator[tuple[str, AnyMapping]]:
    """Yield all mappings below `root`, each after the prefix of its names in the state_dict."""
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, HoldsMappings):
            for table, mapping in module.mappings.items():
                yield f"{path}.{table}", mapping


def keys_of_mapping(root: nn.Module, mapping: AnyMapping) -> dict[str, Any]:
    """Return where the state of `root` has a mapping: `names`, all its keys; `ids`, the key of the
    ids, and `rows`, that of their rows where they are sorted, or None."""
    prefix = next(prefix for prefix, held in _held_below(root) if held is mapping)
    names = [prefix + name for name in state_of(mapping)]
    if isinstance(mapping, MchMapping):
        return {"ids": prefix + MCH_IDS, "rows": prefix + MCH_ROWS, "names": names}
    return {"ids": prefix + _name(mapping, "ids"), "rows": None, "names": names}


def load_mappings(root: nn.Module, state: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """Load the mappings of all modules below `root` that are in a state_dict. Return their keys,
    and what is wrong."""
    loaded: set[str] = set()
    errors: list[str] = []
    for prefix, mapping in _held_below(root):
        missing, problems = _load_mapping(mapping, state, prefix)
        errors += problems
        loaded |= {prefix + name for name in state_of(mapping)} - set(missing)
    return loaded, errors


def resized_mappings(root: nn.Module, state: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return the rows that mappings below `root` have, and other numbers of rows that they have in
    a state_dict."""
    sizes = set()
    for prefix, mapping in _held_below(root):
        for name, value in state_of(mapping).items():
            saved = getattr(state.get(prefix + name), "shape", None)
            if saved and value.shape and saved[0] != value.shape[0]:
                sizes.add((int(value.shape[0]), int(saved[0])))
    return sizes


class ShardedCollisions(HoldsMappings):
    """Stands for torchrec's ManagedCollisionCollection while it is sharded; ids are mapped where
    their rows are."""

    def __init__(self, mappings: Mapping[str, AnyMapping]) -> None:
        super().__init__()
        self.mappings = mappings

    def forward(self, features: Any, mutate_miss_lengths: bool = True) -> Any:
        """Return `features`."""
        return features

    def evict(self) -> dict[str, Tensor | None]:
        """Return no rows: the ranks that own them have reset those that were evicted."""
        return {}

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the mappings under the names that they have unsharded."""
        destination = {} if destination is None else destination
        self.put_mappings(destination, prefix)
        return destination

    def _load_from_state_dict(
        self, state: Any, prefix: str, _: Any, __: bool, missing: list[str], *lists: Any
    ) -> None:
        self.load_mappings(state, prefix, missing, lists[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedCollisions":
        # A copy has no mappings: this rank has only a part of them.
        return ShardedCollisions({})


_ATTRIBUTE = "_maps_ids_by"
_SHARES = "_shares_rows_of_buckets"


def finds_rows(lookup: nn.Module) -> bool:
    """Whether `attach_mapping` was called for it."""
    return hasattr(lookup, _ATTRIBUTE)


def attach_mapping(lookup: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Let a lookup take ids of any range. state: what checkpoints hold of its mapping, by its names
    there."""
    _, num_buckets, num_reserved = state[MADE_FOR].tolist()
    for name, value in state.items():
        lookup.register_buffer(name, value)
    spec = MappingSpec(len(state["ids"]), num_buckets, num_reserved=num_reserved)
    # Past __setattr__, since the user's class may have one. Neither spec nor hook is a closure:
    # both can be pickled.
    lookup.__dict__[_ATTRIBUTE] = spec
    lookup.register_forward_pre_hook(_find, with_kwargs=True)


def mapping_state_of(lookup: nn.Module) -> dict[str, Tensor]:
    """Return the state that `attach_mapping` was given."""
    saved = {}
    for name, value in lookup.named_buffers(recurse=False):
        if name in SAVED_NAMES:
            saved[name] = value
    return saved


def lookups_with_mappings(
    root: nn.Module, state: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the lookups below `root` whose mappings are in a state_dict, each with its part of
    that."""
    for path in [key.removesuffix(f".{MADE_FOR}") for key in state if key.endswith(f".{MADE_FOR}")]:
        lookup_state = {}
        for name in SAVED_NAMES:
            if f"{path}.{name}" in state:
                lookup_state[name] = state[f"{path}.{name}"]
        yield root.get_submodule(path), lookup_state


def restore_mch(module: Any, state: Mapping[str, Tensor]) -> None:
    """Set the full state of an unsharded MCHManagedCollisionModule, by its names."""
    set_mch_state(module, {name: state[name] for name in mch_state(module)}, state[MCH_LOOKUPS])
    share_rows_of_buckets(module, state[MCH_SEGMENTS])


def share_rows_of_buckets(module: Any, segments: Tensor) -> None:
    """Let ids without a row share the last one of their bucket; unsharded, torchrec has no buckets.

    module: an unsharded MCHManagedCollisionModule. segments: where its buckets ended when it was
    sharded, -1 behind.
    """
    buckets = int((segments >= 0).sum()) - 1
    # With one bucket, torchrec's last row is that bucket's. A second hook would do the same again.
    if buckets > 1 and not hasattr(module, _SHARES):
        num_ids = 0 if module.input_size() == ANY_ID else module.input_size()
        spec = MappingSpec(module.output_size(), buckets, num_ids)
        setattr(module, _SHARES, module.register_forward_hook(partial(_share, spec)))


def mch_modules_of(root: nn.Module, state: Mapping[str, Any]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the MCHManagedCollisionModules below `root` that are in a state_dict, each with its
    segments there."""
    for path, module in root.named_modules():
        segments = state.get(f"{path}.{MCH_SEGMENTS}")
        if type(module) is MCHManagedCollisionModule and segments is not None:
            yield module, segments


def _share(
    spec: MappingSpec, module: Any, arguments: tuple[Any, ...], mapped: dict[str, JaggedTensor]
) -> Any:
    ids = module.preprocess(arguments[0])
    shared = {}
    for name, rows in mapped.items():
        # Unsharded, torchrec gives all ids without a row the last row of the table.
        last = (bucket_of(spec, ids[name].values()) + 1) * spec.bucket_rows - 1
        rows_or_last = torch.where(rows.values() == spec.num_rows - 1, last, rows.values())
        shared[name] = JaggedTensor(
            rows_or_last,
            lengths=rows.lengths(),
            offsets=rows.offsets(),
            weights=rows.weights_or_none(),
        )
    return shared


def _find(
    lookup: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    spec: MappingSpec = getattr(lookup, _ATTRIBUTE)
    input_ids: Tensor = arguments[0] if arguments else options["input"]
    # As in training: ids were spread over the buckets before they were sent.
    ids = mixed(input_ids.flatten().long())
    places: Any = lookup.ids
    result = probe(spec, ids, places, bucket_of(spec, ids), spec.max_probe).view(input_ids.shape)
    return ((result, *arguments[1:]), options) if arguments else ((), {**options, "input": result})

"""predict_step as a program of torch.export, of tables and of a batch's tensors; tables stay in a
file of their own.

A quantized row is as FBGEMM's inference kernels have it. 8 bits: dim bytes, then scale and offset
in float32. 4 bits: two numbers in a byte, the first in its low half, then scale and offset in
float16. A number is `bits * scale + offset`.
Source: fbgemm_gpu's FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional
from typing_extensions import override

from lightning_distrec._compat.torch import sizes_from_zero
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges
from lightning_distrec.errors import ConfigError
from lightning_distrec.serving.follow import quantized
from lightning_distrec.serving.nearest_rows import dequantized


def lookups_of(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Yield what reads rows, by path. Raises ConfigError: one has a max_norm, with which a lookup
    changes rows."""
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)):
            if inner.max_norm is not None:
                raise ConfigError(
                    f"'{path}' has a max_norm: its lookups change rows, and serving only reads "
                    "them."
                )
            yield path, inner


def quantize_lookups(module: nn.Module, bits: int) -> dict[str, int]:
    """Replace what reads rows of `module` by what reads quantized ones, which are empty. Return
    bits by path."""
    # A bag's padding_idx is not known to the replacement, so a bag that has one keeps its rows.
    bits_by_path = {}
    for path, inner in list(lookups_of(module)):
        if isinstance(inner, nn.EmbeddingBag) and inner.padding_idx is not None:
            continue
        # FBGEMM packs pairs of bytes, which dims of other multiples do not have in 4 bits.
        bits_by_path[path] = table_bits = 8 if inner.embedding_dim % 4 else bits
        parent, _, name = path.rpartition(".")
        new: _Quantized = QuantizedEmbedding(inner, table_bits)
        if isinstance(inner, nn.EmbeddingBag):
            new = QuantizedBag(inner, table_bits)
        if hasattr(inner, "ids_made_for"):
            from lightning_distrec.sharding.mapping.state import attach_mapping, mapping_state_of

            attach_mapping(new, mapping_state_of(inner))
        module.get_submodule(parent).add_module(name, new)
    return bits_by_path


def find_rows(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Let lookups of `module` take ids of any range, where a checkpoint's state has the rows of
    their ids."""
    if not any(key.endswith((".ids_made_for", "._output_segments_tensor")) for key in state):
        return
    from lightning_distrec.sharding.mapping.state import (
        attach_mapping,
        finds_rows,
        lookups_with_mappings,
        mch_modules_of,
        share_rows_of_buckets,
    )

    for mch, segments in mch_modules_of(module, state):
        share_rows_of_buckets(mch, materialized(segments))
    for lookup, lookup_state in lookups_with_mappings(module, state):
        if not finds_rows(lookup):
            attach_mapping(
                lookup, {name: materialized(value) for name, value in lookup_state.items()}
            )


def packed_width(dim: int, bits: int) -> int:
    """Return the bytes of a row of `dim` numbers."""
    return dim + 8 if bits == 8 else dim // 2 + 4


class _Quantized(nn.Module):
    rows: Tensor

    def __init__(self, original: nn.Embedding | nn.EmbeddingBag, bits: int) -> None:
        super().__init__()
        self.num_embeddings = original.num_embeddings
        self.embedding_dim = original.embedding_dim
        self.bits = bits
        width = packed_width(self.embedding_dim, bits)
        # Without rows: the program gets them as an input, in the buffer's place.
        self.register_buffer("rows", torch.empty(0, width, dtype=torch.uint8), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The full table, for models that multiply with it."""
        return dequantized(self.rows, self.embedding_dim, self.bits)


class QuantizedEmbedding(_Quantized):
    """nn.Embedding, of rows as `quantized` packs them."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids, input.shape + (embedding_dim,)."""
        rows = dequantized(
            self.rows.index_select(0, input.flatten().long()), self.embedding_dim, self.bits
        )
        return rows.reshape(*input.shape, self.embedding_dim)


class QuantizedBag(_Quantized):
    """nn.EmbeddingBag without padding_idx, of rows as `quantized` packs them."""

    def __init__(self, original: nn.EmbeddingBag, bits: int) -> None:
        super().__init__(original, bits)
        self.mode = original.mode
        self.include_last_offset = original.include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one pooled row per bag, (num_bags, embedding_dim). Arguments:
        nn.EmbeddingBag's."""
        ids = input.flatten().long()
        # Not self.rows[ids], for which -1 is the last row.
        rows = dequantized(self.rows.index_select(0, ids), self.embedding_dim, self.bits)
        # The rows that were looked up become a table themselves, of which each row is read once.
        places = torch.arange(ids.shape[0], device=ids.device).reshape(input.shape)
        offsets = None if offsets is None else offsets.long()
        mode = self.mode
        has_last = self.include_last_offset
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=has_last,
        )


class QuantizedTensor(LazyTensor):
    """A table that is quantized while it is read. source: (num_rows, dim), of any floating type."""

    dtype = torch.uint8

    def __init__(self, source: LazyTensor, bits: int) -> None:
        self._source = source
        self._bits = bits
        self.shape = (source.shape[0], packed_width(source.shape[1], bits))

    @override
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        """Quantize the rows of `chunks`, which have full rows."""
        dim = self._source.shape[1]
        for chunk in chunks:
            # 4 bytes a number: FBGEMM quantizes from float32, whatever the table's type.
            for first, count in row_ranges((chunk.tensor.shape[0], dim), 4):
                rows = torch.empty((count, dim), dtype=self._source.dtype)
                offset = chunk.offsets[0] + first
                self._source.read_into([Chunk((offset, 0), rows)])
                chunk.tensor[first : first + count] = quantized(rows.float(), self._bits)


ONLY = "input"
"""The name of a batch that is one tensor."""


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, sequences, dataclasses and TorchRec's jagged tensors, by
    their path."""
    tensors: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = tensor
        return tensor

    _mapped(batch, "", note)
    return tensors


def with_tensors(batch: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return `batch` with other tensors. tensors: by the names that `tensors_of` gives them; left
    out: as they are."""
    return _mapped(batch, "", lambda name, tensor: tensors.get(name, tensor))


def _mapped(value: Any, path: str, replace: Callable[[str, Tensor], Tensor]) -> Any:
    def inner(name: Any, item: Any) -> Any:
        return _mapped(item, f"{path}.{name}" if path else str(name), replace)

    if isinstance(value, Tensor):
        return replace(path or ONLY, value)
    if isinstance(value, Mapping):
        return {name: inner(name, item) for name, item in value.items()}
    # Named tuples take their items as arguments, other tuples one iterable.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
        return type(value)(*[inner(name, item) for name, item in items])
    if isinstance(value, (list, tuple)):
        return type(value)(inner(number, item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # dataclasses.replace raises for fields that __init__ does not take.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: inner(name, getattr(value, name)) for name in names}
        return dataclasses.replace(value, **changes)
    if type(value).__module__.startswith("torchrec."):
        return _mapped_jagged(value, path, inner)
    return value


def _mapped_jagged(value: Any, path: str, inner: Callable[[str, Any], Any]) -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    if isinstance(value, KeyedTensor):
        return KeyedTensor(value.keys(), value.length_per_key(), inner("values", value.values()))
    if not isinstance(value, (JaggedTensor, KeyedJaggedTensor)):
        return value
    if isinstance(value, KeyedJaggedTensor) and value.variable_stride_per_key():
        raise ConfigError(
            f"'{path or ONLY}' has features of unequal batch sizes, which cannot be exported."
        )
    parts = {
        "values": inner("values", value.values()),
        "lengths": inner("lengths", value.lengths()),
    }
    if value.weights_or_none() is not None:
        parts["weights"] = inner("weights", value.weights())
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), **parts)
    return JaggedTensor(**parts)


PREDICT = "predict_step"


class _Predictor(nn.Module):
    """A method as the forward of a module, which functional_call needs."""

    def __init__(self, module: LightningModule, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, batch: Any) -> Any:
        if self.method == PREDICT:
            return self.module.predict_step(batch, 0)
        return getattr(self.module, self.method)(batch)


class Program(nn.Module):
    """predict_step of a module, of tables and of a batch's tensors, or another method of a
    batch."""

    def __init__(self, module: LightningModule, batch: Any, method: str = PREDICT) -> None:
        """module: unsharded; its own tables are not read. batch: gives the containers, and what is
        no tensor."""
        super().__init__()
        self.predictor = _Predictor(module, method)
        self._batch = batch

    def forward(self, tables: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
        """Return what the method returns. tables: by their names in `module`. inputs: as
        `tensors_of` names them."""
        # Passed in place of the module's own weights, tables are inputs of the program and not
        # saved with it.
        named = {f"module.{name}": table for name, table in tables.items()}
        return torch.func.functional_call(
            self.predictor, named, (with_tensors(self._batch, inputs),)
        )


def export_program(
    module: LightningModule, tables: dict[str, Tensor], batch: Any, method: str
) -> tuple[ExportedProgram, dict[str, Tensor]]:
    """Return the program, for any first sizes, and the inputs that it needs. Raises ConfigError:
    export fails."""
    inputs = tensors_of(batch)
    program = Program(module, batch, method)
    # Twice: only a program shows which inputs it reads, and a server should not have to send the
    # others.
    used = _used(_exported(program, tables, inputs), inputs)
    return _exported(program, tables, used), used


def _exported(
    program: Program, tables: dict[str, Tensor], inputs: Mapping[str, Tensor]
) -> ExportedProgram:
    sizes = (
        dict.fromkeys(tables),
        {name: {0: Dim.AUTO} if tensor.dim() else None for name, tensor in inputs.items()},
    )
    level = logging.root.level
    # torchrec warns there that export is slow with a KeyedJaggedTensor
    logging.root.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), sizes_from_zero():
            # Not strict: the step runs as ordinary Python on traced tensors, without Dynamo's
            # limits.
            exported = export(
                program,
                (tables, dict(inputs)),
                dynamic_shapes=sizes,
                strict=False,
            )
    except Exception as error:
        name = type(program.predictor.module).__name__
        lines = [*str(error).strip().splitlines(), type(error).__name__]
        raise ConfigError(
            f"export: torch.export cannot follow {program.predictor.method} of {name}: "
            f"{lines[0].strip()[:300]}. It needs operations of tensors, without branches on their "
            "values."
        ) from error
    finally:
        logging.root.setLevel(level)
    if needed_packages(exported):
        with torch.no_grad(), sizes_from_zero(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own names
            # Operators that torch has as well: with them most servers need no fbgemm_gpu.
            import fbgemm_gpu  # noqa: F401  it registers the operators

            # of jagged offsets, in most programs
            cumsum = torch.ops.fbgemm.asynchronous_complete_cumsum.default
            exported = exported.run_decompositions({cumsum: _complete_cumsum})
    exported.example_inputs = None  # they would be saved, with the tables among them
    return exported


def _used(exported: ExportedProgram, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that the program reads."""
    # Tables come first, then the batch. A slice from -0 would be all of them: hence the condition.
    names = exported.graph_signature.user_inputs[-len(inputs) :] if inputs else ()
    read = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    inputs_by_name = {}
    for name, inside in zip(inputs, names, strict=True):
        if inside in read:
            inputs_by_name[name] = inputs[name]
    return inputs_by_name


def free_sizes(
    exported: ExportedProgram, inputs: Mapping[str, Tensor]
) -> dict[str, list[int | None]]:
    """Return the shape of each input; None where the size may differ from request to request."""
    nodes = (
        [node for node in exported.graph.nodes if node.op == "placeholder"][-len(inputs) :]
        if inputs
        else []
    )
    sizes: dict[str, list[int | None]] = {}
    for name, node in zip(inputs, nodes, strict=True):
        shape = node.meta["val"].shape
        sizes[name] = [size if isinstance(size, int) else None for size in shape]
    return sizes


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def needed_packages(exported: ExportedProgram) -> list[str]:
    """Return the packages, beside torch, whose operators the program calls."""
    spaces = set()
    for node in exported.graph.nodes:
        if node.op == "call_function":
            spaces.add(str(node.target).split(".")[0])
    return ["fbgemm_gpu"] if "fbgemm" in spaces else []

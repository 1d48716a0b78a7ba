"""predict_step as a program of torch.export, of tables and of a batch's tensors; tables stay in a file of their own."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from lightning_distrec._compat.torch import sizes_from_zero
from lightning_distrec.errors import ConfigError

ONLY = "input"
"""The name of a batch that is one tensor."""


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, sequences, dataclasses and TorchRec's jagged tensors, by their path."""
    tensors: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = tensor
        return tensor

    _mapped(batch, "", note)
    return tensors


def with_tensors(batch: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return `batch` with other tensors. tensors: by the names that `tensors_of` gives them; left out: as they are."""
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
        return type(value)(*(inner(name, item) for name, item in zip(value._fields, value, strict=True)))
    if isinstance(value, (list, tuple)):
        return type(value)(inner(number, item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # dataclasses.replace raises for fields that __init__ does not take.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: inner(name, getattr(value, name)) for name in names})
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
        raise ConfigError(f"'{path or ONLY}' has features of unequal batch sizes, which cannot be exported.")
    parts = {"values": inner("values", value.values()), "lengths": inner("lengths", value.lengths())}
    if value.weights_or_none() is not None:
        parts["weights"] = inner("weights", value.weights())
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), **parts)
    return JaggedTensor(**parts)


class _Predictor(nn.Module):
    """predict_step as the forward of a module, which functional_call needs."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module.predict_step(batch, 0)


class Program(nn.Module):
    """predict_step of a module, of tables and of a batch's tensors."""

    def __init__(self, module: LightningModule, batch: Any) -> None:
        """module: unsharded; its own tables are not read. batch: gives the containers, and what is no tensor."""
        super().__init__()
        self.predictor, self._batch = _Predictor(module), batch

    def forward(self, tables: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
        """Return what predict_step returns. tables: by their names in `module`. inputs: as `tensors_of` names them."""
        # Passed in place of the module's own weights, tables are inputs of the program and not saved with it.
        named = {f"module.{name}": table for name, table in tables.items()}
        return torch.func.functional_call(self.predictor, named, (with_tensors(self._batch, inputs),))


def export_program(
    module: LightningModule, tables: dict[str, Tensor], batch: Any
) -> tuple[ExportedProgram, dict[str, Tensor]]:
    """Return the program, for any first sizes, and the inputs that it needs. Raises ConfigError: export fails."""
    inputs = tensors_of(batch)
    program = Program(module, batch)
    # Twice: only a program shows which inputs it reads, and a server should not have to send the others.
    used = _used(_exported(program, tables, inputs), inputs)
    return _exported(program, tables, used), used


def _exported(program: Program, tables: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> ExportedProgram:
    sizes = (dict.fromkeys(tables), {name: {0: Dim.AUTO} if tensor.dim() else None for name, tensor in inputs.items()})
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # torchrec warns there that export is slow with a KeyedJaggedTensor
    try:
        with torch.no_grad(), sizes_from_zero():
            # Not strict: the step runs as ordinary Python on traced tensors, without Dynamo's limits.
            exported = export(program, (tables, dict(inputs)), dynamic_shapes=sizes, strict=False)
    except Exception as error:
        name = type(program.predictor.module).__name__
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"export: torch.export cannot follow predict_step of {name}: {first.strip()[:300]}. It needs operations of "
            "tensors, without branches on their values."
        ) from error
    finally:
        logging.root.setLevel(level)
    if needed_packages(exported):
        with torch.no_grad(), sizes_from_zero(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own names
            # Operators that torch has as well: with them most servers need no fbgemm_gpu.
            import fbgemm_gpu  # noqa: F401  it registers the operators

            cumsum = torch.ops.fbgemm.asynchronous_complete_cumsum.default  # of jagged offsets, in most programs
            exported = exported.run_decompositions({cumsum: _complete_cumsum})
    exported.example_inputs = None  # they would be saved, with the tables among them
    return exported


def _used(exported: ExportedProgram, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that the program reads."""
    # Tables come first, then the batch. A slice from -0 would be all of them: hence the condition.
    names = exported.graph_signature.user_inputs[-len(inputs) :] if inputs else ()
    read = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    return {name: inputs[name] for name, inside in zip(inputs, names, strict=True) if inside in read}


def free_sizes(exported: ExportedProgram, inputs: Mapping[str, Tensor]) -> dict[str, list[int | None]]:
    """Return the shape of each input; None where the size may differ from request to request."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(inputs) :] if inputs else []
    return {
        name: [size if isinstance(size, int) else None for size in node.meta["val"].shape]
        for name, node in zip(inputs, nodes, strict=True)
    }


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def needed_packages(exported: ExportedProgram) -> list[str]:
    """Return the packages, beside torch, whose operators the program calls."""
    spaces = {str(node.target).split(".")[0] for node in exported.graph.nodes if node.op == "call_function"}
    return ["fbgemm_gpu"] if "fbgemm" in spaces else []

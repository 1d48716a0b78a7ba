"""Writes a trained module as a folder that answers without this package, and compares its answers
with the module's.

- program.pt2: predict_step, by torch.export, with all weights but the tables'.
- tables.safetensors: the tables, in float or quantized; a server maps them into memory.
- serving.json: inputs, quantization, and how far the answers were from the module's.
- examples.safetensors, request.json: a batch with the module's answers; a first request.
- serve.py, app.py: answer requests (answer.py); follow.py: takes publications over.
- columns.json, raw_values.py: how raw values become inputs, where the data was columns.
- nearest_rows.py, items.faiss: find the best rows of a table, where a method returns queries.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_distrec.atomic_files import fsync
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized
from lightning_distrec.checkpoint.tensor_files import write_safetensors
from lightning_distrec.chunks import num_bytes
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.serving import answer, follow, nearest_rows
from lightning_distrec.serving.item_table import TopK, best_items, described_items
from lightning_distrec.serving.program import (
    PREDICT,
    Program,
    QuantizedTensor,
    export_program,
    find_rows,
    free_sizes,
    lookups_of,
    needed_packages,
    quantize_lookups,
    tensors_of,
)

TABLES = "tables.safetensors"
PROGRAM = "program.pt2"
ABOUT = "serving.json"
SCRIPT = "serve.py"
EXAMPLES = "examples.safetensors"
REQUEST = "request.json"
COLUMNS = "columns.json"
ALIGNMENT = 64
"""Bytes, as torch's own allocations: products round by where rows lie, and so as the module's."""


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """What a batch was made of."""

    mapping: dict[str, Any]
    """From columns to the batch, as `Columns.to_plain` returns it."""
    rows: list[dict[str, Any]]
    """The batch's raw values by column, in JSON's types."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What was written, and how far its answers are from the trained module's."""

    num_tables: int
    table_bytes: int
    float_bytes: int
    """The size that the tables have in the checkpoint."""
    num_examples: int
    largest_difference: float
    """Of the folder's answers to the examples from the trained module's; of numbers that are no
    integers."""
    mean_difference: float
    largest_answer: float
    integers: int
    """How many integers the answers have, such as ids."""
    other_integers: int
    """How many of them differ from the trained module's."""
    needs: list[str]
    """Packages that a server needs beside torch, numpy and safetensors."""
    only_this_size: bool
    """Whether an input must have as many examples as `batch` had."""
    index_recall: float | None = None
    """Share of the exact best rows, of the examples, that the index finds."""


def export_for_serving(
    module: LightningModule,
    batch: Any,
    folder: Path,
    *,
    state: Mapping[str, Any] | None = None,
    first_request: Any = None,
    raw: RawRows | None = None,
    bits: int | None = None,
    top_k: TopK | None = None,
    published: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda written: None,
) -> Served:
    """Write `predict_step` of a trained, unsharded module and its tables as a folder that answers
    by itself.

    module: on the host; with `state`, its tables may be on the meta device. batch: for
    predict_step; the program takes batches of any size that have the same containers. state: the
    module's weights, tensors or handles; None: its own. first_request: a smaller batch, for
    request.json. raw: what `batch` was made of; requests are raw rows then.
    bits: 8 or 4 for quantized rows; None keeps them. top_k: answer with the best rows of a table in
    place of `predict_step`.
    published: the `step` of the state, and what a checkpoint has of its publications.
    on_progress: called with bytes of tables written. Disk: the tables, and with `bits` once more in
    float meanwhile. Raises ConfigError: it cannot be exported; CheckpointError: the state lacks
    weights, or the disk has no space.
    """
    if bits not in (None, 8, 4):
        raise ConfigError(f"bits={bits}: must be 8 or 4.")
    state = module.state_dict() if state is None else state
    module = _with_dense_weights(module, state)
    names = [f"{path}.weight" for path, _ in lookups_of(module)]
    tables = {name: state[name] for name in names}
    items: dict[str, Any] = {}
    if top_k is not None:
        request_names = [*tensors_of(batch)] if raw is None else [*raw.rows[0]]
        items = described_items(
            top_k,
            module,
            request_names,
            {} if raw is None else raw.mapping,
        )
    source = _Source(
        module,
        batch,
        first_request,
        raw,
        bits,
        items,
        dict(published or {}),
    )
    with _new_folder(folder, overwrite) as new_folder:
        try:
            served = _write(source, tables, new_folder, on_progress)
            if top_k is not None and top_k.index is not None:
                served = replace(served, index_recall=_add_index(new_folder, top_k.index))
            return served
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error}. Nothing was left there."
            ) from error


def _with_dense_weights(module: LightningModule, state: Mapping[str, Any]) -> LightningModule:
    """Return a copy in which all but the tables have the state's weights, and tables have no
    rows."""
    lookups = dict(lookups_of(module))
    names = {f"{path}.weight" for path in lookups}
    needed = module.state_dict().keys()
    missing = sorted(needed - state.keys())
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks '{missing[0]}' ({len(missing)} of {len(needed)} weights)."
        )
    # deepcopy takes what the memo holds for a finished copy: tables, maybe larger than memory, are
    # never copied.
    memo: dict[int, Any] = {
        id(lookup.weight): nn.Parameter(torch.empty(0), requires_grad=False)
        for lookup in lookups.values()
    }
    copy = deepcopy(module, memo)  # LightningModule leaves its Trainer out
    dense = {name: materialized(state[name]) for name in needed if name not in names}
    try:
        # Tables are left out on purpose; that nothing else is missing was checked above.
        copy.load_state_dict(dense, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is of another model: {error}") from error
    find_rows(copy, state)
    return copy.eval().requires_grad_(False)


@dataclass(frozen=True)
class _Source:
    """What is exported."""

    module: LightningModule
    batch: Any
    first_request: Any
    raw: RawRows | None
    bits: int | None
    items: dict[str, Any]
    """What serving.json says of the item table; empty: predict_step answers."""
    published: dict[str, Any]
    """And of the publication that the state comes after."""


def _add_index(folder: Path, factory: str) -> float:
    """Return the recall of an index that the folder gets."""
    try:
        return answer.add_index(folder, factory)
    except ValueError as error:
        raise ConfigError(f"top_k: {error}.") from error


def _described_inputs(
    program: ExportedProgram, inputs: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return what serving.json says of each input."""
    shapes = free_sizes(program, inputs)
    described: dict[str, dict[str, Any]] = {}
    for name, tensor in inputs.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        described[name] = {"dtype": dtype, "shape": shapes[name]}
        values = inputs.get(f"{name.removesuffix('lengths')}values")
        if name.endswith("lengths") and values is not None and int(tensor.sum()) == len(values):
            described[name]["lengths_of"] = f"{name.removesuffix('lengths')}values"
    return described


def _write(
    source: _Source, tables: dict[str, Any], folder: Path, on_progress: Callable[[int], None]
) -> Served:
    from safetensors.torch import load_file, save_file

    module = source.module
    batch = source.batch
    raw = source.raw
    bits = source.bits
    items = source.items
    method = items.get("queries", PREDICT)
    lazy_tables = {name: as_lazy(value) for name, value in tables.items()}
    sources = {name: lazy for name, lazy in lazy_tables.items() if lazy is not None}
    floats = folder / (TABLES if bits is None else ".floats.safetensors")
    write_safetensors(floats, sources, on_progress, alignment=ALIGNMENT)
    # Before lookups are quantized: what quantization changes is part of the differences.
    with torch.no_grad():
        rows_by_table = load_file(floats)
        expected = Program(module, batch, method)(rows_by_table, tensors_of(batch))
        if items:
            expected = best_items(expected, rows_by_table[items["table"]], items)
    stored: dict[str, Any] = dict(sources)
    if bits is not None:
        # No longer needed: packed rows are made from `sources`, not from this file.
        floats.unlink()
        for path, table_bits in quantize_lookups(module, bits).items():
            stored[f"{path}.rows"] = QuantizedTensor(stored.pop(f"{path}.weight"), table_bits)
            if items.get("table") == f"{path}.weight":
                items |= {"table": f"{path}.rows", "bits": table_bits}
        write_safetensors(
            folder / TABLES,
            stored,
            on_progress,
            alignment=ALIGNMENT,
        )
    program, inputs = export_program(
        module,
        load_file(folder / TABLES),
        batch,
        method,
    )
    torch.export.save(program, folder / PROGRAM)
    needs = needed_packages(program)
    described = _described_inputs(program, inputs)
    about: dict[str, Any] = {
        "of": type(module).__name__,
        "inputs": described,
        "needs": needs,
        "bits": bits,
        "published": source.published,
    }
    scripts = {SCRIPT: answer.__file__, "follow.py": follow.__file__}
    scripts["app.py"] = str(Path(__file__).with_name("app.py"))  # it needs litserve
    files = [TABLES, PROGRAM, EXAMPLES, REQUEST]
    if items:
        about["top_k"] = items
        scripts["nearest_rows.py"] = nearest_rows.__file__
    _write_json(folder / ABOUT, about)
    outputs = answer.leaves(expected)
    examples = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
    examples |= {f"answers.{number}": tensor for number, tensor in enumerate(outputs)}
    # safetensors refuses tensors that share memory, as inputs and outputs of a step may.
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in examples.items()}, folder / EXAMPLES
    )
    if raw is not None:
        from lightning_distrec.data import raw_values  # it needs pyarrow, as the data did

        _write_json(folder / COLUMNS, raw.mapping)
        scripts["raw_values.py"] = raw_values.__file__
        files.append(COLUMNS)
    for name, script in scripts.items():
        shutil.copyfile(script, folder / name)

    # The files on disk answer, by the code that will serve them.
    server = answer.Server(folder)
    answers = answer.leaves(server.answer(inputs))
    request = tensors_of(batch if source.first_request is None else source.first_request)
    fixed = False
    try:
        server.answer(request)
    # torch.export's guards on a size that predict_step has made a number
    except (RuntimeError, ValueError):
        request = inputs
        fixed = True
    if raw is None:
        _write_json(folder / REQUEST, {name: request[name].tolist() for name in inputs})
    else:
        for name, tensor in server.inputs_of_rows(raw.rows).items():
            if not torch.equal(tensor, inputs[name]):
                raise CheckpointError(
                    "raw rows become other inputs than the batch has: their data is not this "
                    "batch's."
                )
        _write_json(folder / REQUEST, raw.rows[: None if fixed else 1])
    if source.first_request is not None and not fixed:
        # Inputs that are as long as each other in both batches have a row for each example, but
        # values have lengths.
        for name in inputs.keys() - {about.get("lengths_of") for about in described.values()}:
            described[name]["rows"] = (
                [len(inputs[name]), len(request[name])] if inputs[name].dim() else []
            )
    differences, differs = answer.differences(answers, outputs)
    largest = float(differences.max())
    crc32 = {name: answer.file_crc32(folder / name) for name in [*files, *scripts]}
    _write_json(folder / ABOUT, {**about, "largest_difference": largest, "crc32": crc32})
    return Served(
        num_tables=len(stored),
        table_bytes=sum(map(num_bytes, stored.values())),
        float_bytes=sum(map(num_bytes, sources.values())),
        num_examples=len(outputs[0]) if outputs and outputs[0].dim() else 1,
        largest_difference=largest,
        mean_difference=float(differences[1:].mean()) if len(differences) > 1 else 0.0,
        largest_answer=max(
            (float(o.abs().max()) for o in outputs if o.is_floating_point() and o.numel()),
            default=0.0,
        ),
        integers=differs.numel(),
        other_integers=int(differs.sum()),
        needs=needs,
        only_this_size=fixed,
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that gets the name `folder` at the end, with all of its files on disk."""
    if os.path.lexists(folder) and not (overwrite and (folder / ABOUT).is_file()):
        advice = "" if overwrite else ", or replace it with --overwrite"
        problem = "is no folder that export wrote" if overwrite else "exists already"
        raise CheckpointError(f"{folder} {problem}. Choose another name{advice}.")
    if not folder.absolute().parent.is_dir():
        raise CheckpointError(
            f"{folder}: the folder {folder.parent} does not exist. Create it first."
        )
    # Next to the target: a rename cannot leave its file system.
    with tempfile.TemporaryDirectory(
        prefix=".distrec-export-", dir=folder.absolute().parent
    ) as unfinished:
        new = Path(unfinished, folder.name)
        new.mkdir()
        yield new
        for file in new.iterdir():
            file.chmod(new.stat().st_mode & 0o666)  # libraries write files for their user alone
            fsync(file)
        fsync(new)
        if folder.exists():
            # Into the temporary folder, with which the old export is removed.
            os.replace(folder, Path(unfinished, "old"))
        os.replace(new, folder)
    fsync(folder.absolute().parent)

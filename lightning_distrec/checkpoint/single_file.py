"""A checkpoint as one file: the one that stock Lightning writes and reads, with what only we need
under a key of ours.

torch.load(weights_only=True), `load_from_checkpoint` and any Trainer read it. Sharded tensors are
gathered on rank 0, optimizers' parameters have numbers as torch gives them, and `EXTRA` has their
names, and what each rank alone has.
"""

import copy
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.atomic_files import UNLIMITED, Pace
from lightning_distrec.checkpoint.atomic_folder import check_format
from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.checkpoint.host_copies import (
    copy_to_host,
    free_host_bytes,
    gather_full,
    num_bytes,
)
from lightning_distrec.checkpoint.hyperparameters import EXTRA, without_hyperparameters
from lightning_distrec.checkpoint.plain_state import (
    STORED,
    as_chunked,
    extract_tensors,
    insert_tensors,
    leaves_of,
    map_nested,
    named_optimizer_state,
    numbered_names,
    plain_optimizer_state,
    read_plain,
    refuse_not_plain,
    to_bytes,
)
from lightning_distrec.checkpoint.save import (
    PLAN_FILE,
    RankContent,
    on_all_ranks,
    unfinished_on_rank_0,
)
from lightning_distrec.chunks import ChunkedTensor
from lightning_distrec.errors import CheckpointError
from lightning_distrec.ranks import Ranks

FILE_FORMAT = 1
"""Version of what a file holds under `EXTRA`; other versions are refused."""
SINGLE_FILE_BYTES = 2 * 2**30
"""A checkpoint with sharded tensors is one file if all of its tensors take less, unless the options
choose a form."""


def fits_in_one_file(
    checkpoint: Mapping[str, Any], options: CheckpointOptions, ranks: Ranks
) -> bool:
    """Collective. Return whether a checkpoint is written as one file; rank 0 decides."""
    # Options are the same on all ranks: none of them reaches the all_gather below.
    if options.distributed is not None:
        return not options.distributed
    plain = 0
    sharded = 0
    for leaf in leaves_of(checkpoint).values():
        chunked = as_chunked(leaf)
        if chunked is not None:
            sharded += num_bytes(chunked)
        elif isinstance(leaf, Tensor):
            plain += leaf.nbytes
    is_small = plain + sharded < SINGLE_FILE_BYTES and sharded < free_host_bytes()
    # Without sharded tensors rank 0 has all of it already, whatever the size: nothing is gathered.
    # Free memory differs between hosts; rank 0's counts, because it is where tensors are gathered.
    fits: list[bool] = ranks.all_gather(not sharded or is_small)
    return fits[0]


@dataclass(frozen=True)
class FileSnapshot:
    """What one rank has of a file."""

    path: Path
    content: dict[str, Any]
    """The checkpoint, with references in the place of sharded tensors; rank 0's is written."""
    tensors: Mapping[str, ChunkedTensor]
    """The sharded tensors by their path in it."""
    rank_state: bytes
    extra: dict[str, Any]
    save: Callable[[dict[str, Any]], None] | None = None
    """Writes what the file holds, on rank 0; None: a local file is written."""

    def on_host(self) -> "FileSnapshot":
        """Return a copy whose tensors share no memory with the module and its optimizers."""

        def copied(leaf: Any, path: str) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.detach().to("cpu", copy=True)
            return copy.deepcopy(leaf)  # objects of the user's, which training may change

        return replace(
            self, content=map_nested(self.content, copied), tensors=copy_to_host(self.tensors)
        )

    def full_content(self, ranks: Ranks) -> dict[str, Any]:
        """Collective. Return what the file holds, on rank 0; an empty dict on the others."""
        full = gather_full(dict(self.tensors), ranks, group=ranks.group)
        states = ranks.all_gather(self.rank_state)
        if ranks.rank:
            return {}
        content = insert_tensors(self.content, lambda reference: full[reference[STORED]])
        optimizers = []
        named = content.get("optimizer_states", [])
        if named:
            # What torch does not keep of an optimizer: its class, its parameters' names, and marks.
            for state in named:
                facts = {"names": numbered_names(state), **state}
                del facts["state"], facts["param_groups"]
                optimizers.append(facts)
            content["optimizer_states"] = list(map(plain_optimizer_state, named))
        content[EXTRA] = {**self.extra, "optimizers": optimizers, "rank_states": states}
        return content

    def write(self, ranks: Ranks, pace: Pace = UNLIMITED) -> None:
        """Collective. Write the file."""
        if self.save is not None:
            self._write_elsewhere(self.save, ranks)
            return

        def complete() -> None:
            if unfinished is not None:
                _save(content, unfinished.path / self.path.name, pace)
                unfinished.complete_as_file(self.path.name)

        with unfinished_on_rank_0(ranks, self.path) as unfinished:
            content = self.full_content(ranks)
            on_all_ranks(ranks, self.path, complete)

    def _write_elsewhere(self, save: Callable[[dict[str, Any]], None], ranks: Ranks) -> None:
        content = self.full_content(ranks)

        def save_on_rank_0() -> None:
            if ranks.rank == 0:
                save(content)

        ranks.all_or_none("saving a checkpoint", save_on_rank_0)


def _save(content: dict[str, Any], path: Path, pace: Pace) -> None:
    """Write a file of torch. Raises OSError: it cannot be written."""
    try:
        # Through Python's file, because torch's own says nothing of a full disk. When closing its
        # archive, torch still raises a RuntimeError on top of what the file raised.
        with pace.open(path) as file:
            torch.save(content, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        # Without one, torch's "enforce fail" is the only sign that a file could not be written.
        raise cause or OSError("torch could not write all of it") from error


def take_file_snapshot(
    content: RankContent, ranks: Ranks, save: Callable[[dict[str, Any]], None] | None = None
) -> FileSnapshot:
    """Collective. Return what this rank has of a file, of plain types. save: writes it, where it is
    no local file."""
    # No paths to divide among ranks: rank 0 writes the file, and keeps replicated tensors in the
    # state.
    state, tensors = extract_tensors(
        content.checkpoint, (), ranks.rank, ranks.num_ranks, content.pickles
    )

    def check() -> bytes:
        # Only rank 0's state is written; other ranks may have what it has not.
        if ranks.rank == 0 and not content.pickles:
            refuse_not_plain(without_hyperparameters(state))
        return to_bytes(dict(content.rank_state))

    rank_state = ranks.all_or_none("saving a checkpoint", check)
    extra = {
        "format": FILE_FORMAT,
        "num_ranks": ranks.num_ranks,
        **content.facts,
        "files": dict(content.extra_files),
    }
    return FileSnapshot(content.path, state, tensors, rank_state, extra, save)


def read_plan(path: Path) -> bytes:
    """Return the plan that a checkpoint's file holds; the content of a file that is no checkpoint
    of ours."""
    if zipfile.is_zipfile(path):
        content = read_plain(path)
        files = content.get(EXTRA, {}).get("files", {}) if isinstance(content, Mapping) else {}
        plan = files.get(PLAN_FILE)
        if isinstance(plan, bytes):
            return plan
    return path.read_bytes()


def split_extra(
    path: Path, content: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a file's checkpoint as our folders have it, and its `EXTRA`; None for a file of
    another program."""
    checkpoint = dict(content)
    extra = checkpoint.pop(EXTRA, None)
    if extra is None:
        return checkpoint, None
    try:
        check_format(path, extra["format"], FILE_FORMAT)
        if extra["optimizers"]:
            pairs = zip(checkpoint["optimizer_states"], extra["optimizers"], strict=True)
            checkpoint["optimizer_states"] = [_named(state, facts) for state, facts in pairs]
        fit_loop = checkpoint.get("loops", {}).get("fit_loop")
        if fit_loop:
            # For stock Lightning; ours are in "rank_states".
            state = dict(fit_loop["state_dict"])
            state.pop("combined_loader", None)
            fit_loop = {**fit_loop, "state_dict": state}
            checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": fit_loop}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: its '{EXTRA}' is not as it was written ({error!r})."
        ) from error
    return checkpoint, extra


def _named(state: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by its parameters' names. facts: what torch does not keep."""
    named = dict(facts)
    names = named.pop("names")
    return named | named_optimizer_state(state, names)

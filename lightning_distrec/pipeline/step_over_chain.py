"""Runs the user's step around the chain, up to it and from its output on, for a batch and its
micro-batches."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec._compat.tensors import replace_calls
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.pipeline.absent_tensors import WAY_OUT, absent_like, is_absent
from lightning_distrec.pipeline.chain import Chain


@dataclass
class Entry:
    """What the chain is called with."""

    value: Any = None
    """The first block's first argument; absent where an earlier stage computes it."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """The other arguments of each block."""


class _EndOfChain(BaseException):
    """Ends a step whose output another rank has. No Exception, so that user code does not catch
    it."""


def enter_chain(chain: Chain, step: Callable[[], Any], has_first_stage: bool = True) -> Entry:
    """Run a step until its chain returns, and drop it there. Returns what the blocks were called
    with.

    Raises UnsupportedError: something happens between two blocks, or the chain is not called, or
    its input is no tensor, or has no values on a rank with the first stage.
    """
    calls = _BlockCalls(chain)
    with calls.intercepted():
        try:
            step()
        except _EndOfChain:
            entry = calls.entry
            _check_input(chain, entry.value, has_first_stage)
            if chain.caller is not None:
                # Each layer runs the whole forward, which takes its own arguments.
                ((args, kwargs),) = entry.arguments
                entry.arguments = [((absent_like(entry.value), *args), kwargs)] * len(chain.blocks)
            return entry
    raise _incomplete(chain)


def leave_chain(chain: Chain, step: Callable[[], Any], output: Tensor) -> Any:
    """Run a step in which the chain returns `output`. Returns what the step returns. Raises as
    `enter_chain`."""
    calls = _BlockCalls(chain, output)
    with calls.intercepted():
        result = step()
    if not calls.is_complete:
        raise _incomplete(chain)
    return result


def _incomplete(chain: Chain) -> UnsupportedError:
    return UnsupportedError(
        f"a step did not call every block of '{chain.path}'. Name the chain that it calls."
    )


def _check_input(chain: Chain, value: Any, has_first_stage: bool) -> None:
    if not isinstance(value, Tensor):
        raise UnsupportedError(
            f"'{chain.paths[0]}' is called with a {type(value).__name__}. Stages send tensors: "
            "pass it one."
        )
    if has_first_stage and is_absent(value):
        raise UnsupportedError(
            f"the input of '{chain.path}' depends on weights that the last stage has. {WAY_OUT}"
        )


class _BlockCalls:
    """The calls of the blocks in one run of a step. output: what the chain returns; None: the step
    ends there."""

    def __init__(self, chain: Chain, output: Tensor | None = None) -> None:
        self._chain = chain
        self._output = output
        self._called = chain.blocks if chain.caller is None else [chain.caller]
        self._hidden: Any = None
        self.entry = Entry()

    @property
    def is_complete(self) -> bool:
        return len(self.entry.arguments) == len(self._called)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        # On the module and past its hooks: those of the blocks run in the stages, once for each
        # micro-batch.
        with ExitStack() as patches:
            for number, block in enumerate(self._called):
                patches.enter_context(replace_calls(block, partial(self._call, number)))
            yield

    def _call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        path = self._chain.paths[number]
        if number != len(self.entry.arguments):
            raise UnsupportedError(
                f"a step calls '{path}' where block {len(self.entry.arguments)} of "
                f"'{self._chain.path}' is next. Call the chain once per step and in order, or name "
                "another one."
            )
        if not args and number == 0:
            raise UnsupportedError(
                f"'{path}' is called without a positional argument. Pass it its input first."
            )
        # By identity: a copy, or a result of an operation on the last output, would be computed on
        # this rank only.
        if not args or (number and args[0] is not self._hidden):
            raise UnsupportedError(_between(self._chain, number))
        if is_absent(args[1:]) or is_absent(kwargs):
            raise UnsupportedError(
                f"'{path}' takes a second argument that depends on weights outside of the chain. "
                "Compute it inside."
            )
        if number == 0:
            self.entry.value = args[0]
        self.entry.arguments.append((args[1:], kwargs))
        if not self.is_complete:
            self._hidden = _Hidden(_between(self._chain, number + 1))
            return self._hidden
        # The last block: here the step ends, or goes on with what the stages have computed.
        if self._output is None:
            raise _EndOfChain
        return self._output


def _between(chain: Chain, number: int) -> str:
    return (
        f"forward computes something between '{chain.paths[number - 1]}' and "
        f"'{chain.paths[number]}', or passes no output of the one to the other as its first "
        "argument, and stages pass outputs on as they are. Move it into a block."
    )


class _Hidden:
    """What a block seems to return while the user's step runs: to be passed to the next block, and
    nothing else."""

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(self.refusal)

    # Python looks operators up on the class, where __getattr__ does not see them.
    __getattr__ = __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = __sub__ = (
        __rsub__
    ) = _refuse
    __truediv__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = __matmul__ = (
        _refuse
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:
            if isinstance(argument, _Hidden):
                raise UnsupportedError(argument.refusal)
        raise UnsupportedError(
            "forward computes something between two blocks. Move it into a block."
        )


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a collection."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return tensors


def batch_size_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor. 0: it has no
    tensor."""
    first = next(iter(tensors_in(batch)), None)
    if first is None:
        return 0
    return len(first) if first.dim() else 1


def split_batch(batch: Any, num: int) -> list[Any]:
    """Return parts of a batch: tensors are divided along their first dim, which must be that of
    examples.

    Raises UnsupportedError: a tensor is not as long as the batch.
    """
    if num == 1:
        return [batch]
    batch_size = batch_size_of(batch)
    for tensor in tensors_in(batch):
        if not tensor.dim() or len(tensor) != batch_size:
            raise UnsupportedError(
                f"a batch has a tensor of shape {tuple(tensor.shape)} next to {batch_size} "
                "examples, which cannot be divided into micro-batches. Stack examples along the "
                "first dim, or use schedule='gpipe'."
            )

    def part(index: int) -> Any:
        return apply_to_collection(
            batch, Tensor, lambda tensor: tensor.chunk(num)[index], allow_frozen=True
        )

    return list(map(part, range(num)))


class BlockArguments:
    """Divides arguments that have a row for each example, a padding mask for example, and passes on
    others.

    Which ones have is learned from a part of a batch: they are shorter there.
    """

    def __init__(self) -> None:
        self._have_rows: dict[Any, list[bool]] = {}
        """Shapes of all tensors -> for each tensor, whether it has a row for each example."""

    def split(self, entry: Entry, num: int, enter_part: Callable[[], Entry]) -> list[Any]:
        """Return the arguments of all blocks, for each of `num` micro-batches.

        enter_part: returns what the blocks are called with for the first micro-batch alone.
        Raises UnsupportedError: a tensor is neither of the same shape there, nor of a share of its
        rows.
        """
        tensors = tensors_in(entry.arguments)
        if num == 1 or not any(tensor.dim() and len(tensor) % num == 0 for tensor in tensors):
            return [entry.arguments] * num
        key = num, tuple(tensor.shape for tensor in tensors)
        # Learned once for each set of shapes: running the step up to the chain for a part costs
        # time.
        if key not in self._have_rows:
            parts = tensors_in(enter_part().arguments)
            self._have_rows[key] = [
                _has_rows(*pair, num) for pair in zip(tensors, parts, strict=True)
            ]

        def part(index: int) -> Any:
            # apply_to_collection goes through tensors in the same order each time.
            has_rows = iter(self._have_rows[key])
            return apply_to_collection(
                entry.arguments,
                Tensor,
                lambda tensor: tensor.chunk(num)[index] if next(has_rows) else tensor,
                allow_frozen=True,
            )

        return list(map(part, range(num)))


def _has_rows(full: Tensor, part: Tensor, num: int) -> bool:
    if full.shape == part.shape:
        return False
    if full.shape[1:] == part.shape[1:] and len(full) == num * len(part):
        return True
    raise UnsupportedError(
        f"blocks take a tensor of shape {tuple(full.shape)} for a batch, and one of "
        f"{tuple(part.shape)} for one of its {num} micro-batches. Let its first dim be that of "
        "examples, or set microbatches=1."
    )

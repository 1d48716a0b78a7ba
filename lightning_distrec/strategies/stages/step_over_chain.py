"""Runs the user's step around the chain: up to it, for the chain's input, and from its output on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from lightning_distrec._compat.tensors import replace_calls
from lightning_distrec.absent_tensors import WAY_OUT, is_absent
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.stages.chain import Chain


@dataclass
class Entry:
    """What the chain is called with."""

    value: Any = None
    """The first block's first argument; absent where an earlier stage computes it."""
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """The other arguments of each block."""


class _EndOfChain(BaseException):
    """Ends a step whose output another rank has. No Exception, so that user code does not catch it."""


class StepOverChain:
    """Takes the place of a chain's blocks while the user's step runs."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def enter(self, step: Callable[[], Any]) -> Entry:
        """Run a step until its chain returns, and drop it there. Returns what the blocks were called with.

        Raises UnsupportedError: something happens between two blocks, or the chain is not called.
        """
        calls = _Calls(self._chain)
        with calls.intercepted():
            try:
                step()
            except _EndOfChain:
                return calls.entry
        raise self._partial()

    def leave(self, step: Callable[[], Any], output: Any) -> Any:
        """Run a step in which the chain returns `output`. Returns what the step returns. Raises as `enter`."""
        calls = _Calls(self._chain, output, ends=False)
        with calls.intercepted():
            result = step()
        if not calls.is_complete:
            raise self._partial()
        return result

    def _partial(self) -> UnsupportedError:
        return UnsupportedError(
            f"a step did not call every block of '{self._chain.path}'. Let every step call them in order, or name the "
            "chain that it calls: chain='...'."
        )


class _Calls:
    """The calls of the blocks in one run of a step."""

    def __init__(self, chain: Chain, output: Any = None, ends: bool = True) -> None:
        self._chain, self._output, self._ends = chain, output, ends
        self._passed: Any = None
        self.entry = Entry()

    @property
    def is_complete(self) -> bool:
        return len(self.entry.others) == len(self._chain.blocks)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        with ExitStack() as patches:
            for number, block in enumerate(self._chain.blocks):
                patches.enter_context(replace_calls(block, partial(self._called, number)))
            yield

    def _called(self, number: int, *args: Any, **kwargs: Any) -> Any:
        if number != len(self.entry.others):
            raise UnsupportedError(
                f"a step calls '{self._chain.path_of(number)}' where block {len(self.entry.others)} of "
                f"'{self._chain.path}' is next. Stages compute the chain once per step and in order: call it once, or "
                "name another chain='...'."
            )
        if not args or not (number == 0 or args[0] is self._passed):
            raise UnsupportedError(_between(self._chain, number))
        if is_absent(args[1:]) or is_absent(kwargs):
            raise UnsupportedError(
                f"'{self._chain.path_of(number)}' takes a second argument that depends on weights outside of the "
                "chain, which the first stage has alone. Compute it inside of the blocks."
            )
        if number == 0:
            self.entry.value = args[0]
        self.entry.others.append((args[1:], kwargs))
        self._passed = _BetweenBlocks(self._chain, number + 1)
        if not self.is_complete:
            return self._passed
        if self._ends:
            raise _EndOfChain
        return self._output


def _between(chain: Chain, number: int) -> str:
    return (
        f"forward computes something between '{chain.path_of(number - 1)}' and '{chain.path_of(number)}', or passes no "
        "output of the one to the other as its first argument, and stages pass outputs on as they are. Move it into a "
        "block."
        if number
        else f"'{chain.path_of(0)}' is called without a positional argument. Pass it its input first."
    )


class _BetweenBlocks:
    """What a block seems to return while the user's step runs: to be passed to the next block, and nothing else."""

    def __init__(self, chain: Chain, number: int) -> None:
        self.__dict__["refuse"] = partial(_refuse_use, chain, number)

    def __getattr__(self, name: str) -> Any:
        self.__dict__["refuse"]()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next((a for a in args if isinstance(a, _BetweenBlocks)), None)
        if found is not None:
            found.__dict__["refuse"]()
        raise UnsupportedError("forward computes something between two blocks. Move it into a block.")

    def _operate(self, *_: Any) -> Any:
        self.__dict__["refuse"]()

    __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = __sub__ = __rsub__ = __truediv__ = _operate
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = __matmul__ = _operate


def _refuse_use(chain: Chain, number: int) -> NoReturn:
    raise UnsupportedError(_between(chain, number))


def check_entry(entry: Entry, is_first: bool, chain: Chain) -> None:
    """Raise UnsupportedError: the chain's input is no tensor, or is absent on the first stage."""
    if not isinstance(entry.value, Tensor):
        raise UnsupportedError(
            f"'{chain.path_of(0)}' is called with a {type(entry.value).__name__}. Stages send tensors: pass it one."
        )
    if is_first and is_absent(entry.value):
        raise UnsupportedError(
            f"the input of '{chain.path}' depends on weights that the last stage has, because they are registered "
            f"after the chain. {WAY_OUT}"
        )

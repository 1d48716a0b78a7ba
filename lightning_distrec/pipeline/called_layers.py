"""Layers that a forward calls, without a container, as the block of a stage, with what it computes
between them."""

from typing import Any

from torch import Tensor, nn

from lightning_distrec.errors import UnsupportedError
from lightning_distrec.pipeline.absent_tensors import is_absent
from lightning_distrec.pipeline.chain import Chain


class _Reached(BaseException):
    """Ends a forward at a layer's input. No Exception, so that user code does not catch it."""


class CalledLayers(nn.Module):
    """The layers of one stage as one block, with what the forward that calls them computes up to
    the next stage.

    It runs that forward. What is before the first layer runs on absent tensors, which have shapes
    alone and draw nothing. So what the forward takes from there, beside that layer's input, is
    absent too, and so is then the result.
    """

    def __init__(self, chain: Chain, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(chain.blocks[number] for number in numbers)
        self._path = chain.paths[numbers.start]
        self._is_first = not numbers.start
        # In a tuple: as attributes they would be submodules, with the weights of other stages.
        self._others: tuple[Any, ...] = chain.caller, *chain.blocks[numbers.stop : numbers.stop + 1]

    def forward(self, value: Tensor, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the next stage's layer is called with, or the forward returns. inputs: the
        caller's, absent."""
        caller, *following = self._others
        pending = [] if self._is_first else [value]

        def begin(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            # Once: a further call must be computed from what the layer has returned.
            return (pending.pop(), *arguments[1:]) if pending and is_absent(arguments[:1]) else None

        hooks = [self.layers[0].register_forward_pre_hook(begin, prepend=True)]
        hooks += [layer.register_forward_pre_hook(_reach, prepend=True) for layer in following]
        try:
            result = caller(value if self._is_first else inputs, *args, **kwargs)
        except _Reached as reached:
            (result,) = reached.args
        finally:
            for hook in hooks:
                hook.remove()
        if isinstance(result, Tensor) and not is_absent(result):
            return result
        raise UnsupportedError(
            f"forward does not go on from '{self._path}', where a stage begins, with one tensor "
            "that is computed from this layer's input alone. Let stages begin at other layers "
            "(split), or register layers in the order of their calls."
        )


def _reach(_: nn.Module, arguments: tuple[Any, ...]) -> None:
    raise _Reached(arguments[0] if arguments else None)

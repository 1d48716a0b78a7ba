"""What we use of torch's dispatcher."""

import inspect
import re
import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from lightning_distrec._compat import tensors as dispatch

ATEN = torch.ops.aten


def test_operations_are_watched_inside_of_the_context_only() -> None:
    seen: list[object] = []
    x = torch.arange(3)
    assert torch._C._len_torch_dispatch_stack() == 0
    with dispatch.watch_operations(
        lambda operation, args, kwargs, output: seen.append((operation, args[0], output))
    ):
        assert torch._C._len_torch_dispatch_stack() == 1
        y = x + 1
    x + 2
    assert [operation for operation, _, _ in seen] == [ATEN.add.Tensor]
    assert seen[0][1] is x
    assert seen[0][2] is y


def test_a_function_that_is_first_called_while_watched_is_compiled_afterwards() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with dispatch.watch_operations(lambda *_: None):
        double(torch.ones(2))
    double(torch.ones(2))
    assert compiled


def test_arguments_are_named() -> None:
    assert dispatch.argument_names(ATEN.narrow.default) == ["self", "dim", "start", "length"]


def test_what_is_written_in_place_is_known() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert [first is x for first in dispatch.written_by(ATEN.add_.Tensor, (x, y), {})] == [True]
    assert list(dispatch.written_by(ATEN.add.Tensor, (x, y), {})) == []
    assert [first is y for first in dispatch.written_by(ATEN.add.out, (x, x), {"out": y})] == [True]


def test_views_have_one_storage() -> None:
    x = torch.zeros(4)
    assert dispatch.storage_key(x[1:]) == dispatch.storage_key(x)
    assert dispatch.storage_key(x.clone()) != dispatch.storage_key(x)


def test_calls_of_a_module_are_replaced_until_they_are_given_back() -> None:
    module = torch.nn.Linear(2, 2)
    hooks: list[object] = []
    module.register_forward_hook(lambda *_: hooks.append(None))
    patches = dispatch.replace_calls(module, lambda value, factor: (value, factor))
    assert torch.nn.Module.__call__(module, 1, factor=2) == (1, 2)
    assert hooks == []
    patches.close()
    assert module(torch.ones(2)).shape == (2,)
    assert len(hooks) == 1
    compiled = torch.nn.Linear(2, 2)
    compiled._compiled_call_impl = lambda value: "compiled"
    dispatch.replace_calls(compiled, lambda value: "replaced").close()
    assert compiled(1) == "compiled"


def test_sends_of_stages_are_watched_and_the_watch_can_be_undone() -> None:
    original = distributed.P2POp
    patches = dispatch.watch_sends(lambda *_: None)
    assert distributed.P2POp is not original
    assert issubclass(distributed.P2POp, original)  # batch_isend_irecv looks at the class
    patches.close()
    assert distributed.P2POp is original
    for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
        # releases break lines differently
        source = "".join(inspect.getsource(getattr(PipelineStage, name)).split())
        assert re.search(r"dist\.P2POp\(dist\.isend,\w+,peer_global_rank", source)


def test_operations_that_return_views_are_known() -> None:
    assert dispatch.returns_view(ATEN.narrow.default)
    assert dispatch.returns_view(ATEN.detach.default)
    assert not dispatch.returns_view(ATEN.clone.default)


def test_trunc_normal_asks_for_the_device_in_a_frame_that_shows_its_options() -> None:
    drawn = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            drawn.append(dispatch.truncated_draw(sys._getframe(1)))
            return super().__torch_function__(function, types, args, kwargs or {})

    torch.nn.init.trunc_normal_(torch.empty(2, 2).as_subclass(Asked), std=0.5, a=-1.0, b=1.0)
    assert {"mean": 0.0, "std": 0.5, "a": -1.0, "b": 1.0} in drawn
    assert dispatch.truncated_draw(sys._getframe()) is None


def test_a_parameter_of_a_tensor_of_another_class_is_made_by_detach() -> None:
    asked = {}

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked[function.__name__] = dispatch.makes_parameter(sys._getframe(1))
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.empty(2).as_subclass(Asked)
    tensor.detach()
    assert asked == {"detach": False}
    torch.nn.Parameter(tensor)
    assert asked["detach"]

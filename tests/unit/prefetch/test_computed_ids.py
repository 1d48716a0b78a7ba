"""What was computed ahead is compared late where the host cannot wait; operations of torch are
watched as expected."""

import pytest
import torch
from torch import nn

from lightning_distrec._compat.tensors import argument_names, watch_operations, written_by
from lightning_distrec.errors import ProvenanceError
from lightning_distrec.prefetch.control_message import LateComparison


def test_a_difference_is_raised_in_a_later_step() -> None:
    compared, ids = LateComparison(), torch.arange(5)
    assert compared.is_empty
    assert compared.add(ids, ids.clone())
    compared.end_step()
    compared.check()
    compared.add(ids, ids.clone())
    compared.add(ids, ids + 1)
    compared.check()
    compared.end_step()
    with pytest.raises(ProvenanceError, match="in an earlier step.*'computed_ids': False"):
        compared.check()
    compared.check()


def test_the_last_step_is_waited_for() -> None:
    compared, ids = LateComparison(), torch.arange(5)
    compared.add(ids, ids + 1)
    with pytest.raises(ProvenanceError, match="resume from a checkpoint"):
        compared.check(wait=True)


def test_operations_are_watched_with_the_numbers_that_python_reads() -> None:
    seen: list[str] = []
    x = torch.arange(6).view(2, 3)
    with watch_operations(lambda function, args, kwargs, output: seen.append(str(function))):
        y = x[:, :-1] + torch.tensor([1, 2])
        y.add_(int(x.max()))
    assert seen == [
        *("aten.slice.Tensor", "aten.lift_fresh.default"),
        *(
            "aten.add.Tensor",
            "aten.max.default",
            "aten._local_scalar_dense.default",
            "aten.add_.Tensor",
        ),
    ]
    add = torch.ops.aten.add_.Tensor
    assert list(written_by(add, (x, 1), {})) == [x]
    assert argument_names(torch.ops.aten.slice.Tensor) == ["self", "dim", "start", "end", "step"]


def test_watching_leaves_the_fast_path_of_transformers_and_compiled_functions() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 5, 16)
    compiled = torch.compile(lambda t: t.sin() * 2, backend="aot_eager")
    seen: list[str] = []
    with torch.no_grad():
        plain = layer(x)
        with watch_operations(lambda function, *_: seen.append(str(function))):
            assert torch.equal(layer(x), plain)
            assert torch.equal(compiled(x), x.sin() * 2)
    assert "aten._transformer_encoder_layer_fwd.default" in seen
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0

"""What is checked on a GPU before anything is computed there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_distrec.errors import VersionError
from lightning_distrec.gpu import require_kernels

CUDA = torch.device("cuda", 0)
NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")
NO_BACKEND = NotImplementedError("Could not run 'fbgemm::...' with arguments from the 'CUDA' backend.")


def failing(error: Exception) -> Any:
    def operate(lengths: torch.Tensor) -> None:
        assert lengths.device.type == "cuda"
        raise error

    return operate


@pytest.mark.parametrize("error", [NO_IMAGE, NO_BACKEND])
def test_an_fbgemm_without_kernels_for_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", failing(error))
    properties = SimpleNamespace(name="RTX 5090", major=12, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with FakeTensorMode(), pytest.raises(VersionError, match=r"no kernels for RTX 5090(.|\n)*ARCH_LIST=12\.0"):
        require_kernels(CUDA)


def test_other_errors_of_the_gpu_are_not_taken_for_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", failing(RuntimeError("out of memory")))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="^out of memory$"):
        require_kernels(CUDA)
    require_kernels(torch.device("cpu"))

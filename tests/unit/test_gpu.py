"""What is checked on a GPU before anything is computed there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_distrec.errors import VersionError
from lightning_distrec.gpu import DeviceTimes, require_kernels

CUDA = torch.device("cuda", 0)
NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")
NO_BACKEND = NotImplementedError(
    "Could not run 'fbgemm::...' with arguments from the 'CUDA' backend."
)


def failing(error: Exception) -> Any:
    def operate(lengths: torch.Tensor) -> None:
        assert lengths.device.type == "cuda"
        raise error

    return operate


@pytest.mark.parametrize("error", [NO_IMAGE, NO_BACKEND])
def test_an_fbgemm_without_kernels_for_the_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", failing(error))
    properties = SimpleNamespace(name="RTX 5090", major=12, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with (
        FakeTensorMode(),
        pytest.raises(VersionError, match=r"no kernels for RTX 5090(.|\n)*ARCH_LIST=12\.0"),
    ):
        require_kernels(CUDA)


class FakeEvent:
    """An event of a device that runs behind the host; to wait for one is an AttributeError."""

    queued: list["FakeEvent"] = []
    num_passed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.place = len(self.queued)
        self.queued.append(self)

    def query(self) -> bool:
        return self.place < FakeEvent.num_passed

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.query()
        return 1000.0 * (later.place**2 - self.place**2)


def test_times_of_a_device_are_read_in_order_once_it_has_passed_their_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "queued", [])
    times, read = DeviceTimes(), []
    for num_passed in (2, 5, 5, 12):  # three events in each step
        times.begin()
        times.end("forward")
        times.end("backward")
        monkeypatch.setattr(FakeEvent, "num_passed", num_passed)
        read.append(times.end_step())
    first, second = (
        {"forward": 1.0, "backward": 4.0 - 1.0},
        {"forward": 16.0 - 9.0, "backward": 25.0 - 16.0},
    )
    assert read == [{}, first, {}, second]

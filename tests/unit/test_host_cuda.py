"""The CUDA device in host memory does what a GPU does, as far as programs see it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host_cuda.runs import variables_or_skip

PROGRAM = """
import sys
import threading

import torch

sys.path.append({start!r})
import host_cuda_runtime

ones = torch.ones(4, 4, device="cuda:1")
try:
    ones + torch.ones(4)
except RuntimeError as error:
    assert "Expected all tensors to be on the same device" in str(error)
else:
    raise AssertionError("devices were mixed")

weight = torch.nn.Parameter(torch.ones(4, 4, device="cuda"))
threads = []
weight.register_hook(lambda gradient: threads.append(threading.get_ident()))
(weight * 2).sum().backward()
assert threads[0] != threading.get_ident(), "backward ran on the caller's thread"
assert torch.equal(weight.grad.cpu(), torch.full((4, 4), 2.0))

torch.manual_seed(1)
drawn = torch.rand(8, device="cuda").cpu()
torch.manual_seed(1)
assert torch.equal(torch.rand(8, device="cuda").cpu(), drawn)
torch.manual_seed(1)
assert not torch.equal(torch.rand(8), drawn), "a GPU draws other numbers"

pinned = torch.empty(4, pin_memory=True)
pinned.copy_(torch.ones(4, device="cuda"), non_blocking=True)
assert pinned.isnan().all(), "read before the host has waited"
torch.cuda.synchronize()
assert pinned.eq(1).all()

host_cuda_runtime.forget_reports()
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    doubled = weight.detach() * 2
doubled + 1
(hazard,) = host_cuda_runtime.reports("hazard")
assert "reads what cuda:0 stream" in hazard[0]
torch.cuda.current_stream().wait_stream(stream)
doubled + 1
assert len(host_cuda_runtime.reports("hazard")) == 1
assert not host_cuda_runtime.reports("wait")
weight.sum().item()
assert len(host_cuda_runtime.reports("wait")) == 1

try:
    torch.empty(3 << 20, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("more memory than the device has")
"""


@pytest.mark.slow
def test_programs_see_a_cuda_device(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    variables = variables_or_skip(devices=2, device_bytes=1 << 20)
    start = variables["PYTHONPATH"].partition(":")[0]
    script.write_text(PROGRAM.format(start=start))
    done = subprocess.run(
        [sys.executable, str(script)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""A CUDA device whose memory is the host's, so that CUDA paths run on machines without a GPU, on a
CPU build of torch.

    python -m tests.support.host_cuda --devices 2 SCRIPT ARGUMENTS...

runs a script, and all processes that it starts, with the device. At the end it prints which hazards
between streams and which waits of the host there were. C++ gives torch the CUDA dispatch key, its
guard, streams, events and generators (`device.cpp`), memory that knows which stream used it
(`memory.cpp`), runs each operation by the CPU's kernel over the same memory (`fallback.cpp`), and
lets gloo exchange it between ranks (`exchanges.cpp`). What a CPU build's `torch._C` lacks stands in
`start/host_cuda_runtime.py`, and torch.cuda's own code runs on it; `start/host_nccl.py` is a
process group called nccl, and `start/host_fbgemm.py` has FBGEMM's optimizers, its rows on the host
and their cache.

It shows what a program does: devices that are mixed, backward on a thread of the device, memory,
streams that have not waited for each other, waits of the host. It cannot show faults of kernels,
times, or races that only hardware has.
"""

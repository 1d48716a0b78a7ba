"""Where tests of this folder are skipped. Apart from device.py, which tests.gpu.smoke uses where
there is no pytest."""

import pytest
import torch

from tests.gpu.device import DEVICE

runs_here = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU on this machine"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

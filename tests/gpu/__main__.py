"""Runs the tests that need a GPU. Where there is none it says so, exits with 0, and claims no pass.

    python -m tests.gpu

Of the packages that only tests need it takes pytest alone, without plugins: a machine with a GPU
may have no network.
"""

import importlib.util
import sys

import torch

NO_PYTEST = (
    "pytest is not installed, which these tests need. `python -m tests.gpu.smoke` checks "
    "most without it."
)


def main() -> int:
    """Return pytest's exit code; 0 where there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no CUDA device on this machine: no test was run, and none has passed.")
        return 0
    if importlib.util.find_spec("pytest") is None:
        print(NO_PYTEST)
        return 1
    import pytest

    # The options in pyproject.toml want plugins.
    return int(pytest.main(["tests/gpu", "-q", "-o", "addopts=", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())

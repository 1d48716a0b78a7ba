"""Asks a served folder in a process that can import neither this package nor torchrec."""

import sys
from pathlib import Path

from tests.support.console import finished
from tests.support.environments import environment

ABSENT = ["lightning_distrec", "lightning", "torchrec", "fbgemm_gpu", "pyarrow", "pandas"]
WITHOUT = f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
RUN = "sys.argv = ['serve.py', *{}]\nrunpy.run_path('serve.py', run_name='__main__')\n"


def ask(folder: Path, *commands: list[str], code: str = "") -> list[str]:
    """Run some code, then serve.py with each list of arguments, in one process; return the lines
    that it prints."""
    script = WITHOUT + code + "\n" + "".join(RUN.format(arguments) for arguments in commands)
    done = finished([sys.executable, "-c", script], folder, env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

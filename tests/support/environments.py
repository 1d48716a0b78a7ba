"""The variables for a program that a test starts as a user would, whoever started the tests."""

import os
import re

# What would make a program believe that it had been launched already.
_LAUNCHED = re.compile(
    r"(SLURMD?|SBATCH|SALLOC|SRUN|SQUEUE|SCANCEL|SINFO|PMIX?|OMPI|MPI|I_MPI|HYDI?|LSB|LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|PL)_"
    r"|(RANK|WORLD_SIZE|NODE_RANK)$"
)


def environment(**extra: str) -> dict[str, str]:
    """Return this process's variables without those of a launcher, and with more."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHED.match(name)} | extra

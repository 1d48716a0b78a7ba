"""What stands around the tables of the page about performance."""

from tests.benchmarks.page import versions
from tests.benchmarks.performance_contenders import CUT, Turn
from tests.benchmarks.performance_link import STEP_BYTES
from tests.benchmarks.performance_model import (
    BATCH_SIZE,
    DIM,
    HIDDEN,
    LARGEST_BAG,
    NUM_DENSE,
    NUM_TABLES,
)
from tests.benchmarks.performance_runs import DELAY_MILLISECONDS, MANY_ROWS, NUM_RANKS, ROWS
from tests.support.two_machines import LEAST_BURST_KILOBYTES

TURN = Turn()


def head(machine: str) -> str:
    """Return the beginning of the page. machine: in words."""
    return f"""# Performance

Step times of `Trainer(strategy="torchrec_sharded")` over those of a loop written by hand with torchrec's
`DistributedModelParallel` and `TrainPipelineSparseDist`: below 1, ours is faster. **Bold** misses its aim.

`python -m tests.benchmarks.performance` writes this page and its numbers. The machine has {machine}. Ranks are
{NUM_RANKS} processes of one thread each; gloo. Versions: {versions()}."""


def method(rounds: int) -> str:
    """Return how it is measured."""
    return f"""## How it is measured

torchrec's DLRM: {NUM_TABLES} tables of {ROWS:,} x {DIM}, bags of 0 to {LARGEST_BAG} ids, {NUM_DENSE} dense floats, two
MLPs of {HIDDEN}; {BATCH_SIZE} examples per rank, SGD, fused updates, `{CUT}`. All contenders start from the same
weights, read the same batches, and take turns in the same processes, in another order in each of {rounds} rounds. Of
{TURN.steps} steps of a turn the first {TURN.first} and last {TURN.last} do not count; all of Lightning does. Compared
are medians over all rounds. "Logged" logs the loss and updates a `BinaryAUROC` at every step; the loop by hand does
neither."""


STEPS = """## Step by step

Medians: as it is, with every exchange late, and over links of limited rate."""

DELAY = f"""Late: each all-to-all of torchrec takes {DELAY_MILLISECONDS:.0f} ms at least, in the background."""

LINK = f"""Links: each rank is in a network namespace, and `tc tbf` limits what leaves it (burst: a millisecond, at
least {LEAST_BURST_KILOBYTES} kB). What they carried, in Mbit/s; the all-to-all sends {STEP_BYTES / 1e6:.1f} MB:"""

LOSSES = """## The same numbers

The largest difference of any step's loss in these runs, on rank 0:"""

TIME = "## Where the time goes"

WHERE_THE_TIME_GOES = """\
Medians of another run on the same machine:

| ms | by hand | ours, not prefetched | ours, prefetched |
| --- | ---: | ---: | ---: |
| forward | 17.4 | 18.0 | 13.0 |
| backward | 23.1 | 22.5 | 18.1 |
| the rest inside of `optimizer.step` and its closure | 0.6 | 2.9 | 2.0 |
| Lightning's loop around it | – | 1.0 | 0.9 |
| the step | 41.9 | 44.4 | 34.0 |

- **Not prefetched**, the rest is Lightning's loop: 2 to 3 ms, of which our checks take 0.3 ms. A lookup has the
  exchanges of the hand-written loop and no more.
- **Prefetched**, early lookups and early gradients pay for it. Waiting for the control message takes 0.03 ms.
- **Logged**: `self.log` calls that recur check their arguments once; see [host time](#host-time-of-a-step).
- **On a link of 200 Mbit/s** a step sends 1.29 MB (by hand 1.38) each way: 51 ms. The all-to-all of gloo posts
  sends before receives, and two ranks then use one direction after the other. 0.5 MB each way take 39 ms so, and 21
  between nodes where ours posts receives first (`_compat/gloo.py`). `quantized_comms` sends fewer bytes."""
"""What was found, put here by hand."""

NOTHING_YET = "<!-- to be written -->"


def ddp(times: str) -> str:
    """Return the section about Lightning's own strategy. times: a table."""
    return f"""## Against Lightning's DDP

The same LightningModule with `strategy="ddp"`, where every rank holds all rows. {MANY_ROWS:,} rows ran once, after
ours, for three steps: they leave no memory for turns.

{times}"""


MEMORY = """Memory, in the first table: what the largest rank holds of the tables, and by how much its process grows,
over an equal share."""

GPU = """## On a GPU

Nothing was run on a GPU yet, and these ratios say nothing about it."""

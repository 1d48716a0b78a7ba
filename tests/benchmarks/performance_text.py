"""What stands around the tables of the page about performance."""

from tests.benchmarks.page import versions
from tests.benchmarks.performance_contenders import CUT, Turn
from tests.benchmarks.performance_link import STEP_BYTES
from tests.benchmarks.performance_model import BATCH_SIZE, DIM, HIDDEN, LARGEST_BAG, NUM_DENSE, NUM_TABLES
from tests.benchmarks.performance_runs import DELAY_MILLISECONDS, MANY_ROWS, NUM_RANKS, ROWS
from tests.support.two_machines import LEAST_BURST_KILOBYTES

TURN = Turn()


def head(machine: str) -> str:
    """Return the beginning of the page. machine: in words."""
    return f"""# How fast

Step times of `Trainer(strategy="torchrec_sharded")` against a loop that is written by hand with torchrec alone:
`DistributedModelParallel`, its planner, and for the pipelined one `TrainPipelineSparseDist`. Below 1, ours is faster.

This page is written by `python -m tests.benchmarks.performance`, every number in it by the run. The machine has
{machine}.
Ranks are {NUM_RANKS} processes of one thread each that exchange by gloo. Versions: {versions()}.

A number in **bold** misses its aim. A dash stands where there is none."""


def method(rounds: int) -> str:
    """Return how it is measured."""
    return f"""## How it is measured

torchrec's DLRM: {NUM_TABLES} tables of {ROWS:,} x {DIM}, bags of 0 to {LARGEST_BAG} ids, {NUM_DENSE} dense floats, two
MLPs of {HIDDEN}; {BATCH_SIZE} examples for each rank and step, SGD, tables updated inside of backward and cut
`{CUT}` by both planners. All sides start from the same weights and read the same batches, drawn before, from the
same kind of loader.

All contenders of a table take turns in the same processes, in another order in each of {rounds} rounds. A turn is
{TURN.steps} steps, ours in a `Trainer.fit` of its own; the first {TURN.first} and last {TURN.last} do not count. A step
lasts from its beginning to that of the next, as rank 0 sees it: for ours from one `on_train_batch_start` to the next,
all of Lightning included. The medians of all steps of all rounds are compared; beside their ratio stands the least and
the most that single rounds would have said.

"Logged" logs the loss and updates a torchmetrics `BinaryAUROC` at every step; the loop by hand does neither."""


STEPS = """## Step by step

Medians in milliseconds: as it is, with every exchange late, and over links of limited rate."""

DELAY = f"""Late: from its start, each all-to-all of torchrec takes {DELAY_MILLISECONDS:.0f} ms at least, forward,
backward and ids alike, for all contenders. The time passes in the background, as on a slow network: who starts an
exchange early need not wait for it."""

LINK = f"""Links: each rank is in a network namespace of its own, and `tc tbf` limits what leaves it, with a burst of a
millisecond (at least {LEAST_BURST_KILOBYTES} kB). What they carried, in Mbit/s; an all-to-all over gloo, here of
{STEP_BYTES / 1e6:.1f} MB to the other rank, fills them less well than one long send."""

LOSSES = """## The same numbers

The largest difference of any step's loss in these runs, on rank 0:"""

TIME = "## Where the time goes"

WHERE_THE_TIME_GOES = """\
Medians of the parts of a step, by spans and by hand, all in one process group, in another run on the same machine:

| ms | by hand | ours, un-pipelined | ours, pipelined |
| --- | ---: | ---: | ---: |
| forward | 17.4 | 18.0 | 13.0 |
| backward | 23.1 | 22.5 | 18.1 |
| the rest inside of `optimizer.step` and its closure | 0.6 | 2.9 | 2.0 |
| Lightning's loop around it | – | 1.0 | 0.9 |
| the step | 41.9 | 44.4 | 34.0 |

- **Un-pipelined, what is left is Lightning's loop**: hooks, closure, progress and logger bookkeeping, 2 to 3 ms
  here, which a hand-written loop does not have. Our own checks before a step are about 0.3 ms of it. A lookup has
  the exchanges of the hand-written loop and no more: the verdict on ids rides on torchrec's exchange of sizes,
  buffers that never change are not broadcast, Lightning's SIGTERM broadcast is gone, and columns are not copied
  into the unsharded order where they are asked for by name.
- **Pipelined**, that loop costs as much, and is paid for by rows that are looked up when the step begins and by
  gradients that leave as soon as they are there. The ranks' message is there when it is read (0.03 ms of waiting).
- **Logged**: two `self.log` and an update of BinaryAUROC take 2.5 ms a step, on our side only. They are Lightning's
  and torchmetrics'.
- **On a link of 200 Mbit/s the aim is missed, and so by every exact contender.** By spans of a run of its own, ours
  pipelined (110 ms a step): 0.5 MB of rows arrive 33 ms after they were asked for, which is 120 Mbit/s, though a
  bare all-to-all of that size reaches 170 to 200; backward takes 65 ms, in which as many bytes of gradients, the
  dense averages and the next ids share the link, where computing takes 18 ms. Rows must be here before gradients can
  leave, and in between only ids are on the way. So the bytes themselves are the step: fewer of them help, as
  `quantized_comms` shows. Sending ids as 32-bit numbers, where tables allow it, is the next thing to try."""
"""What the author found out about it."""

NOTHING_YET = "<!-- to be written -->"


def ddp(times: str) -> str:
    """Return the section about Lightning's own strategy. times: a table."""
    return f"""## Against Lightning's DDP

The same LightningModule with `strategy="ddp"`: every rank holds all rows, and gradients of whole tables travel. With
{ROWS:,} rows it takes turns with ours, shorter ones; with {MANY_ROWS:,} it leaves no memory for anything else, so that
it runs after ours, once, and three of its steps count.

{times}"""


MEMORY = """## Memory

What the largest rank holds of the tables, over what an equal share would be; and by how much its process is larger in
the middle of training than before the module was built, over the same share."""

GPU = """## On a GPU

Nothing was run on a GPU yet. There, exchanges are faster, and waits for the host cost more: these ratios say nothing
about it."""

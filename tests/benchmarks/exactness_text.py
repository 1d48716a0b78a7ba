"""What the page about exactness says around its tables."""

from tests.benchmarks.exactness_cases import CLIPS, RANKS, STEPS, a_scaler
from tests.benchmarks.exactness_model import SKIPPED_STEPS
from tests.benchmarks.page import versions

FORMS = {
    "sum": "Sum pooling",
    "mean": "Mean pooling",
    "weighted": "Weighted pooling",
    "sequence": "Sequences",
    "embedding": "`nn.Embedding`",
    "embedding_bag": "`nn.EmbeddingBag`",
}
DETAILS, REFUSALS = "exactness_by_sharding_type.csv", "exactness_refusals.txt"
"""Files next to the page."""
NAMES_OF_WAYS = {
    "plain": "plain",
    "accumulate": "accumulate",
    "clip norm": "clip by norm",
    "clip value": "clip by value",
    "scaler": "loss scaling",
    "manual": "manual",
    "freezing": "freezing",
    "unequal": "unequal batches",
}


def ranks(number: int) -> str:
    """Return how a number of ranks is written."""
    return "1 rank" if number == 1 else f"{number} ranks"


def head(summary: str, on_gpu: bool) -> str:
    """Return the beginning of the page. summary: a table."""
    place = "Ranks are\nprocesses that exchange by gloo; all arithmetic is the CPU's"
    place += (
        ", though the machine has a GPU." if on_gpu else (". Nothing here was measured on a GPU.")
    )
    return f"""# Exactness

{summary}

Compared are all weights after {STEPS} steps: `Trainer(strategy="torchrec_sharded")` against a plain torch loop in one
unsharded process over the same global batches. Each number is the larger of {" and ".join(map(str, RANKS))} ranks. In
float32, what remains is the order of sums.

`python -m tests.benchmarks.exactness` writes this page and every number in it. {place}
Each process has one thread. Versions: {versions()}. **Bold**: over its limit. A dash: there is no such form."""


WAYS = f"""## Optimizers, updates and ways to run the loop

The largest difference of any weight: tables of bags (sum, mean and weighted), sequences, `nn.Embedding` and
`nn.EmbeddingBag`, of all sharding types; [this file]({DETAILS}) has them one by one. Rates and `eps` are small enough
not to hide an error behind a gradient that cancels. Every weight that learns has moved by at least 1e-4. "refused"
stands where a fused update is asked for and something must happen
between backward and step; `embedding_update="auto"` chooses another update there. Every way changes the unsharded run
by more than ten times what is allowed.
Where repeated ids are sent once, a rank adds up their gradients first: another order of additions, within these limits.

- accumulate: `accumulate_grad_batches=4`; clip: by norm {CLIPS["clip norm"][1]}, by value {CLIPS["clip value"][1]}.
- loss scaling: `GradScaler(init_scale={a_scaler().get_scale():.0f})`; one rank overflows at {len(SKIPPED_STEPS)} steps.
- manual: `automatic_optimization=False`, two backwards for each step, one where the update is fused.
- freezing: some tables rest for three steps.
- unequal batches: the loss is the mean over all examples."""

PRECISIONS = """## Precision

Tables / dense layers, against an unsharded loop in the same arithmetic. 1e-3 is allowed in all columns but the first:
what remains is 16-bit rounding. float16 tables are rounded after every update."""

AVERAGES = """## Averages of weights

Lightning's callbacks on 2 ranks, against `torch.optim.swa_utils.AveragedModel` over the unsharded run:"""

BY_RANKS = """## Number of ranks

The largest difference of any step's mean loss, and of any weight, to one process with the same global batches:"""

REFUSED = f"""## What is refused

Each refusal was provoked on 2 ranks, and all ranks raised it. [This file]({REFUSALS}) has the messages. The
[page by symptom](faq.md#errors-by-name) has them by class."""

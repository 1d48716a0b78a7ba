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
OF_FORM = {
    "sum": "`EmbeddingBagCollection` with `PoolingType.SUM`. Each table is looked up by two features.",
    "mean": "`EmbeddingBagCollection` with `PoolingType.MEAN`, bags of 0 to 4 ids.",
    "weighted": "`EmbeddingBagCollection(is_weighted=True)`: every id comes with a weight.",
    "sequence": "`EmbeddingCollection`: one vector for each id. torchrec cuts its tables in these three ways.",
    "embedding": '`convert_embeddings="all"`, called with ids of two dimensions.',
    "embedding_bag": '`convert_embeddings="all"`, `mode="sum"` and `"mean"` in turn.',
}
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


def head(on_gpu: bool) -> str:
    """Return the beginning of the page."""
    where = "Ranks are\nprocesses that exchange by gloo; all arithmetic is the CPU's"
    where += ", though the machine has a GPU." if on_gpu else ". Nothing here was measured on a GPU."
    return f"""# How exact

What is compared is the largest absolute difference of any weight, tables and dense layers, after {STEPS} steps: a
run of `Trainer(strategy="torchrec_sharded")`, and a plain torch loop in one unsharded process over the same global
batches. Each number is the larger one of {" and ".join(map(str, RANKS))} ranks.

What remains in float32 is addition in another order: a gradient is summed over ranks, over rows and over bags in
another sequence, and float32 has seven digits. Every weight that learns has moved by at least 1e-4, so that nothing
passes by standing still; and every way to run the loop changes the unsharded run by more than ten times what is
allowed.

This page is written by `python -m tests.benchmarks.exactness`, every number in it by the run. {where}
Each process has one thread. Versions: {versions()}.

A number in **bold** is over its limit. A dash stands where there is no such form."""


OPTIMIZERS = f"""## Optimizers, updates and cuts

One model holds all of these tables at once; {STEPS} steps of 8 examples on each rank. The update is asked for by
`embedding_update`, except for `data_parallel` tables, which the user's optimizer updates by a dense gradient, always.

Optimizers that divide by the size of the gradient turn the rounding of one that cancels to nearly nothing into a step
of their full rate; the rates and `eps` here keep that small, so that it cannot hide an error. `SparseAdam` takes sparse
gradients only: it is over `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, and the dense layers rest.

The largest difference over all cuts:"""

WAYS = f"""## Ways to run the loop

The same optimizers over mean-pooled tables, sequences and an `nn.Embedding`, cut in four ways (`SparseAdam` over
`nn.Embedding` and `nn.EmbeddingBag`). The largest difference of any weight.

"refused" stands where an update inside of backward is asked for and something must come between backward and step;
`embedding_update="auto"` chooses another update there.

- plain: the largest of the section before.
- accumulate: `accumulate_grad_batches=4`.
- clip by norm, by value: `gradient_clip_val={CLIPS["clip norm"][1]}`, and {CLIPS["clip value"][1]}. The norm is that
  of all shards and dense layers.
- loss scaling: a `torch.amp.GradScaler` (init_scale={a_scaler().get_scale():.0f}), and a loss that overflows on one
  rank at {len(SKIPPED_STEPS)} steps: all ranks skip these steps, and the scale at the end is that of the unsharded run.
  Layers compute in float32 all the same.
- manual: `automatic_optimization=False`, two backwards for each step, or one where the update is fused; with
  `SparseAdam` a second optimizer for the dense layers.
- freezing: tables that are cut by rows, and those that every rank holds whole, rest for three steps in the middle.
- unequal batches: ranks have batches of unequal sizes, and the loss is the mean over all examples."""

PRECISIONS = """## Precision

Tables / dense layers, against an unsharded loop in the same arithmetic: autocast entered for every step; for `*-true`
dense layers converted, tables kept in float32 and looked up rows cast. 1e-3 is allowed in all columns but the first.

What remains under 16 bits is rounding: gradients are averaged over ranks in the type of the layer, and the weights of
dense layers may differ in their type's last digits. float16 tables (`EmbeddingBagConfig(data_type=DataType.FP16)`,
`nn.Embedding(dtype=torch.float16)`) are rounded after every update, and FBGEMM pools their rows in float32 where torch
does so in float16. The large `eps` and initial sum are there because float16 state cannot hold the square of a small
gradient. `16-mixed` on CPU is `MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))`, with skipped steps as above."""

AVERAGES = """## Averages of weights

Lightning's callbacks on 2 ranks, whose averages are kept shard by shard, against `torch.optim.swa_utils.AveragedModel`
over the unsharded run. The largest difference of any averaged weight:"""

BY_RANKS = """## Number of ranks

The same global batches, cut for 1 to 4 ranks. The largest difference of any step's mean loss, and of any weight at the
end, to one unsharded process:"""

REFUSED = """## What is refused

Each of these was provoked on 2 ranks in the run that wrote this list; what stands here is what was said. All ranks
raise an error of the same kind. What the first list names is raised before the first step."""

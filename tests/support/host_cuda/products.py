"""All that a table may be: how it is updated, in which precision, where its rows are, and by what it is looked up."""

from itertools import product
from typing import Any

import torch

from tests.support.click_model import EvaluatedModel
from tests.support.host_cuda.matrix import Case, Embeddings, SequencesEvaluated

MODELS = {"bags": EvaluatedModel, "sequences": SequencesEvaluated, "nn.Embedding": Embeddings}
UPDATES = {
    "fused": torch.optim.Adagrad,
    "sparse": torch.optim.Adagrad,
    "dense": torch.optim.Adagrad,
    "fused_lazy": torch.optim.Adam,
}
PRECISIONS = ("32", "bf16-mixed", "16-mixed", "bf16-true")
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


def _case(model: str, update: str, precision: str, kernel: str) -> Case:
    options: dict[str, Any] = {"embedding_update": update}
    if model == "nn.Embedding":
        options["convert_embeddings"] = "all"
    on_cpu: dict[str, Any] = {"options": options | {"embedding_update": "dense"} if update == "fused_lazy" else options}
    if precision == "16-mixed":
        on_cpu["trainer"] = {"precision": "32"}
    tolerance = 0.1 if update == "fused_lazy" else 1e-3 if precision == "16-mixed" else 1e-6
    return Case(
        model=MODELS[model],
        optimizer=UPDATES[update],
        options=options | ({} if kernel == "fused" else {"tables": {"*": {"compute_kernels": [kernel]}}}),
        trainer={"precision": precision},
        on_cpu=on_cpu,
        tolerance=tolerance,
    )


PRODUCTS = {
    ", ".join(choice): _case(*choice) for choice in product(MODELS, UPDATES, PRECISIONS, KERNELS)
}

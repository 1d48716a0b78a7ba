"""All that a table may be: how it is updated, in which precision, where its rows are, and by what
it is looked up."""

from itertools import product
from typing import Any

import torch

from tests.support.click_model import EvaluatedModel
from tests.support.host_cuda.matrix import Case, Embeddings, SequencesEvaluated

MODELS = {"bags": EvaluatedModel, "sequences": SequencesEvaluated, "nn.Embedding": Embeddings}
UPDATES = ("fused", "sparse", "dense", "fused_lazy")
PRECISIONS = ("32", "bf16-mixed", "16-mixed", "bf16-true")
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


def _case(model: str, update: str, precision: str, kernel: str) -> Case:
    options: dict[str, Any] = {"embedding_update": update}
    if model == "nn.Embedding":
        options["convert_embeddings"] = "all"
    on_cpu: dict[str, Any] = {"options": options}
    optimizer, tolerance = torch.optim.Adagrad, 1e-6
    if update == "fused_lazy":  # of touched rows alone, for which CPUs have nothing
        optimizer, tolerance = torch.optim.Adam, 0.1
        on_cpu["options"] = options | {"embedding_update": "dense"}
    # Adagrad's first steps have a gradient's sign, even that of a rounded zero
    elif precision != "32":
        optimizer, tolerance = torch.optim.SGD, 1e-4
    if precision == "16-mixed":
        tolerance = 1e-3
        on_cpu["trainer"] = {"precision": "32"}
    if kernel != "fused":
        options = options | {"tables": {"*": {"compute_kernels": [kernel]}}}
    trainer = {"precision": precision}
    return Case(MODELS[model], optimizer, options, trainer, on_cpu=on_cpu, tolerance=tolerance)


def _refusal(update: str, precision: str, kernel: str) -> str:
    """Return words of the error that a combination is, "" where it trains."""
    is_in_backward = update in ("fused", "fused_lazy")
    if not is_in_backward and kernel != "fused":
        return "which needs them in the device's memory"
    if is_in_backward and precision == "16-mixed":
        return "scales the loss and may skip steps"
    return ""


_ALL = {choice: _refusal(*choice[1:]) for choice in product(MODELS, UPDATES, PRECISIONS, KERNELS)}
PRODUCTS = {", ".join(choice): _case(*choice) for choice, words in _ALL.items() if not words}
REFUSED = {
    ", ".join(choice): (_case(*choice), words)
    for choice, words in _ALL.items()
    if words and choice[0] == "bags"
}
"""Name -> case, and words of its error."""

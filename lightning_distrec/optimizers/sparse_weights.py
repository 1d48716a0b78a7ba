"""Weights with sparse gradients: those of nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True)."""

from torch import Tensor, nn


def sparse_weights(module: nn.Module) -> dict[Tensor, str]:
    """Return the weights whose gradients are sparse, and the paths of the modules that own them."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {child.weight: path for path, child in module.named_modules() if isinstance(child, kinds) and child.sparse}

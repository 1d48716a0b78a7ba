"""The baseline: predicts each character from the one before it."""

import torch
from torch import Tensor

from recipes.next_character.text import NUM_CHARACTERS


def pairs_log_loss(train: Tensor, characters: Tensor) -> float:
    """Return the mean of -log(share that the pair had in training among those that begin alike), in
    nats.

    train, characters: (num_characters,) int64. Every pair counts once more than it occurs, so none
    has a share of 0.
    """
    pairs = torch.bincount(train[:-1] * NUM_CHARACTERS + train[1:], minlength=NUM_CHARACTERS**2)
    counts = pairs.view(NUM_CHARACTERS, NUM_CHARACTERS).double() + 1
    shares = counts / counts.sum(dim=1, keepdim=True)
    return -shares[characters[:-1], characters[1:]].log().mean().item()

"""An ordinary LightningModule: HSTU, pointwise attention over jagged sequences of items, predicts
the next one.

Nothing here knows of ranks or shards. Source of the shape: Zhai et al., Actions Speak Louder than
Words: Trillion-Parameter Sequential Transducers for Generative Recommendations, ICML 2024, section
3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from recipes.sasrec.next_item import NextItemModel

BUCKET_WIDTH = 0.301
"""Of the natural logarithm of seconds. With NUM_BUCKETS it reaches eight years. Source: the paper's
public code."""
NUM_BUCKETS = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the places of jagged sequences are in a padded tensor, and back. Made without waiting
    for a GPU."""

    padded: Tensor
    """(batch_size, length) int64: the place that a slot holds; slots after the last one hold any
    place of the batch."""
    slots: Tensor
    """(places,) int64: the slot of each place, sequence after sequence."""
    positions: Tensor
    """(places,) int64: from 0 in each sequence."""

    @staticmethod
    def from_lengths(lengths: Tensor, num_places: int, length: int) -> "Layout":
        """lengths: (batch_size,) int64, whose sum is num_places; none is larger than length."""
        stops = lengths.cumsum(0)
        firsts = stops - lengths
        places = torch.arange(num_places, device=lengths.device)
        rows = torch.searchsorted(stops, places, right=True)
        positions = places - firsts[rows]
        slots = torch.arange(length, device=lengths.device)
        padded = (firsts[:, None] + slots).clamp(max=num_places - 1)
        return Layout(padded=padded, slots=rows * length + positions, positions=positions)

    def pad(self, values: Tensor) -> Tensor:
        """Return (batch_size, length, ...). values: (places, ...)."""
        return values.index_select(0, self.padded.flatten()).unflatten(0, self.padded.shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """Return (places, ...). padded: (batch_size, length, ...)."""
        return padded.flatten(0, 1).index_select(0, self.slots)


class RelativeBias(nn.Module):
    """What is added to the attention of a place to an earlier one: by their distance, and by the
    time between."""

    distances: Tensor
    """(length, length) int64: how far before the row's place the column's is; 0 for later ones,
    which are hidden."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.by_distance = nn.Parameter(torch.empty(length).normal_(std=0.02))
        self.by_time = nn.Parameter(torch.empty(NUM_BUCKETS).normal_(std=0.02))
        places = torch.arange(length)
        self.register_buffer("distances", (places[:, None] - places).clamp(min=0), persistent=False)

    def forward(self, buckets: Tensor) -> Tensor:
        """Return (batch_size, length, length). buckets: as time_buckets returns them."""
        return self.by_distance[self.distances] + self.by_time[buckets]


def time_buckets(times: Tensor, next_times: Tensor) -> Tensor:
    """Return the bucket of the time from each column's event to when the row's answer is asked for.

    times, next_times: (batch_size, length) int64, in seconds. Returns (batch_size, length, length)
    int64.
    """
    seconds = (next_times[:, :, None] - times[:, None, :]).clamp(min=1)
    return (seconds.float().log() / BUCKET_WIDTH).long().clamp(max=NUM_BUCKETS - 1)


class HSTULayer(nn.Module):
    """Attention without a softmax, gated by a projection of its own input; there is no other
    network in a layer."""

    mask: Tensor
    """(length, length) bool: where a place would look at later ones."""

    def __init__(self, length: int, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.projection = nn.Linear(dim, 4 * dim)
        self.bias = RelativeBias(length)
        self.attended_norm = nn.LayerNorm(dim)
        self.output = nn.Sequential(nn.Dropout(dropout), nn.Linear(dim, dim))
        self.register_buffer(
            "mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False
        )

    def forward(self, hidden: Tensor, layout: Layout, buckets: Tensor) -> Tensor:
        """Return (places, dim). hidden: (places, dim). buckets: as time_buckets returns them."""
        projected = functional.silu(self.projection(self.norm(hidden)))
        gate, attention_inputs = projected.split([hidden.shape[1], 3 * hidden.shape[1]], dim=1)
        # (3, batch_size, num_heads, length, dim / num_heads)
        heads = (
            layout
            .pad(attention_inputs)
            .unflatten(2, (3, self.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        values, queries, keys = heads.unbind(0)
        scores = queries @ keys.transpose(-1, -2) + self.bias(buckets)[:, None]
        # What fills up a sequence comes after its last place, so the mask of later places hides it,
        # too.
        weights = functional.silu(scores).masked_fill(self.mask, 0) / len(self.mask)
        attended = layout.unpad((weights @ values).transpose(1, 2).flatten(2))
        return hidden + self.output(gate * self.attended_norm(attended))


class HSTU(NextItemModel):
    """Reads the sequence with HSTU's layers, which know when each item was seen and when the next
    one is asked for."""

    def __init__(
        self,
        num_items: int = 1682,
        length: int = 50,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        dropout: float = 0.2,
        num_negatives: int = 512,
        learning_rate: float = 0.001,
    ) -> None:
        """Set the size of the model and its learning rate.

        Args:
            num_items: ids of items are 1 to this number; 0 is "none".
            length: most items in a sequence.
            dim: numbers per embedding, a multiple of 4 and of num_heads.
            num_layers: blocks of gated attention.
            num_heads: heads of each attention.
            dropout: share of numbers that are dropped in training.
            num_negatives: items drawn per step as negatives for all places of all ranks; 0: all
                items.
            learning_rate: Adam's.
        """
        if dim % num_heads or dim % 4:
            raise ConfigError(
                f"dim={dim}: it must be a multiple of 4 and of num_heads={num_heads}."
            )
        super().__init__(num_items, dim)
        self.save_hyperparameters()
        self.length = length
        self.positions = nn.Embedding(length, dim)
        self.start = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(dropout))
        self.layers = nn.ModuleList(
            HSTULayer(length, dim, num_heads, dropout) for _ in range(num_layers)
        )
        self.end = nn.LayerNorm(dim)
        for embedding in (self.items, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of each place and those before it, (places, dim)."""
        layout = Layout.from_lengths(batch["length"], batch["items"].shape[0], self.length)
        buckets = time_buckets(layout.pad(batch["time"]), layout.pad(batch["following_time"]))
        hidden = self.start(self.items(batch["items"]) + self.positions(layout.positions))
        for layer in self.layers:
            hidden = layer(hidden, layout, buckets)
        return self.end(hidden)

    def last_places(self, batch: dict[str, Tensor]) -> Tensor:
        """Return each sequence's last place, (batch_size,)."""
        return batch["length"].cumsum(0) - 1

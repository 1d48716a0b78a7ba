"""An ordinary LightningModule: self-attention over a sequence of items predicts the next one.

Nothing here knows of ranks or shards. Source of the shape: Kang and McAuley, Self-Attentive
Sequential Recommendation, ICDM 2018; trained on the softmax over all items, as RecBole trains it.
"""

import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError
from recipes.sasrec.next_item import NextItemModel


class SASRec(NextItemModel):
    """Reads the sequence with layers of a Transformer that hide what comes later."""

    mask: Tensor
    """(length, length): -inf where a place would look at later ones."""

    def __init__(
        self,
        num_items: int = 1682,
        length: int = 50,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        hidden: int = 256,
        dropout: float = 0.5,
        num_negatives: int = 0,
        learning_rate: float = 0.001,
    ) -> None:
        """Set the size of the model and its learning rate; most defaults are RecBole's for SASRec.

        Args:
            num_items: ids of items are 1 to this number; 0 is "none".
            length: most items in a sequence.
            dim: numbers per embedding, a multiple of 4 and of num_heads.
            num_layers: blocks of attention and a small network.
            num_heads: heads of each attention.
            hidden: width of the small networks.
            dropout: share of numbers that are dropped in training.
            num_negatives: items drawn per step as negatives for all places of all ranks; 0: all
                items, which suits up to some million.
            learning_rate: Adam's.
        """
        if dim % num_heads or dim % 4:
            raise ConfigError(
                f"dim={dim}: it must be a multiple of 4 and of num_heads={num_heads}."
            )
        super().__init__(num_items, dim)
        self.save_hyperparameters()
        self.positions = nn.Embedding(length, dim)
        self.start = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(dropout))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, num_heads, hidden, dropout, activation="gelu", batch_first=True
            )
            for _ in range(num_layers)
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False
        )
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, items: Tensor) -> Tensor:
        """Return what the model makes of each place and those before it, (batch_size, length, dim).

        items: (batch_size, length) int64.
        """
        hidden = self.start(
            self.items(items) + self.positions(torch.arange(items.shape[1], device=items.device))
        )
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return hidden

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of each place, row after row, (batch_size * length, dim)."""
        return self(batch["items"]).flatten(0, 1)

    def last_places(self, batch: dict[str, Tensor]) -> Tensor:
        """Return each window's last place among all, (batch_size,)."""
        # Of the shape, not of len(): torch.export keeps the first free, and takes the second as a
        # fixed number.
        windows = torch.arange(batch["length"].shape[0], device=batch["length"].device)
        return windows * batch["items"].shape[1] + batch["length"] - 1

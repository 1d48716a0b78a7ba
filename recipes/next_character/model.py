"""An ordinary LightningModule: a transformer that predicts each next character of a text.

Nothing here knows of ranks. It fits on one device, so ranks share the batches: `ddp_tuned`, or any
other strategy. Source of the shape: Radford et al., Language Models are Unsupervised Multitask
Learners, 2019 (GPT-2).
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec.errors import ConfigError
from recipes.next_character.text import NUM_CHARACTERS


class NextCharacter(pl.LightningModule):
    """Predicts the next character after each character of a window, from those up to it."""

    mask: Tensor
    """(length, length): -inf where a character would look ahead."""

    def __init__(
        self,
        length: int = 64,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        learning_rate: float = 0.004,
    ) -> None:
        """Set the size of the model and its learning rate.

        Args:
            length: most characters in a window.
            dim: numbers per character, a multiple of num_heads.
            num_layers: blocks of attention and a small network.
            num_heads: heads of each attention.
            learning_rate: AdamW's.
        """
        super().__init__()
        if dim % num_heads:
            raise ConfigError(
                f"dim={dim} cannot be shared out among num_heads={num_heads}: it "
                "must be a multiple."
            )
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.characters = nn.Embedding(NUM_CHARACTERS, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim,
                num_heads,
                4 * dim,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.last = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, NUM_CHARACTERS))
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False
        )

    def forward(self, windows: Tensor) -> Tensor:
        """Return the log-odds of each next character. windows: (batch_size, length); returns (..,
        NUM_CHARACTERS)."""
        length = windows.shape[1]
        hidden = self.characters(windows) + self.positions(
            torch.arange(length, device=windows.device)
        )
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask[:length, :length], is_causal=True)
        return self.last(hidden)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, in nats per character."""
        loss = self._loss(batch)
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(batch[0])
        self.log(
            "train_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            batch_size=size,
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the validation's loss."""
        self.log(
            "val_loss", self._loss(batch), prog_bar=True, batch_size=len(batch[0]), sync_dist=True
        )

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely next character after each, (batch_size, length)."""
        return self(batch[0]).argmax(dim=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        windows, following = batch
        return functional.cross_entropy(self(windows).flatten(0, 1), following.flatten())

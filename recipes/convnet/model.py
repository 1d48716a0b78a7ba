"""An ordinary LightningModule: ResNet-18 for pictures of 32 x 32. Nothing here knows of ranks.

Source of the shape: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385. As
usual for CIFAR, the first layer is 3 x 3 without stride and there is no pooling after it.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from recipes.convnet.data import NUM_CLASSES

WEIGHT_DECAY = 5e-4


class Block(nn.Module):
    """Two convolutions, and what was there before added to their result."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch_size, channels, size / stride, size / stride)."""
        return functional.relu(self.layers(inputs) + self.shortcut(inputs))


class ResNet18(pl.LightningModule):
    """Predicts the class of a picture."""

    def __init__(
        self,
        channels: int = 64,
        learning_rate: float = 0.05,
        momentum: float = 0.9,
        blocks_per_stage: int = 2,
    ) -> None:
        """Set the size of the model and its learning rate.

        Args:
            channels: of the first of four stages; each next one has twice as many. ResNet-18 has
                64.
            learning_rate: SGD's, for the global batch size that it was chosen with;
                ScaledLearningRate scales it.
            momentum: SGD's.
            blocks_per_stage: 2 in ResNet-18.
        """
        super().__init__()
        self.save_hyperparameters()
        stages: list[nn.Module] = []
        in_channels = channels
        for stage in range(4):
            for block in range(blocks_per_stage):
                stride = 2 if stage and not block else 1
                stages.append(Block(in_channels, channels << stage, stride))
                in_channels = channels << stage
        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(in_channels, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the log-odds of each class, (batch_size, 10). pictures: (batch_size, 3, 32,
        32)."""
        return self.layers(pictures)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        pictures, kinds = batch
        loss = functional.cross_entropy(self(pictures), kinds)
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(kinds)
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
        """Add a batch to the validation's accuracy and loss."""
        pictures, kinds = batch
        scores = self(pictures)
        self.val_accuracy.update(scores, kinds)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=len(kinds))
        loss = functional.cross_entropy(scores, kinds)
        self.log("val_loss", loss, prog_bar=True, batch_size=len(kinds), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of each picture, (batch_size,)."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, as the paper has it."""
        return torch.optim.SGD(
            self.parameters(),
            lr=self.hparams["learning_rate"],
            momentum=self.hparams["momentum"],
            weight_decay=WEIGHT_DECAY,
        )

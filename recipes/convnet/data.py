"""Pictures of CIFAR-10's shape, made by seed: ten textures, each at a random place, in random colours, under noise."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_distrec.errors import ConfigError

NUM_CLASSES = 10
SIZE = 32


class Textures(Dataset):
    """Picture k is drawn from seed and k alone, so every rank and worker sees the same one."""

    def __init__(self, num_pictures: int, seed: int, noise: float) -> None:
        """noise: standard deviation of what is added to each number of a picture."""
        self.num_pictures = num_pictures
        self.seed = seed
        self.noise = noise
        lines = torch.arange(SIZE, dtype=torch.float32)
        self._down, self._across = torch.meshgrid(lines, lines, indexing="ij")

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return the picture, (3, 32, 32) float32, and its class."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % NUM_CLASSES
        # A class is the angle and the fineness of its stripes; their phase and colours say nothing.
        angle = torch.tensor(torch.pi * (kind % 5) / 5)
        fineness = 0.5 if kind < 5 else 1.0
        phase = 2 * torch.pi * torch.rand((), generator=random)
        stripes = torch.sin(fineness * (self._down * angle.cos() + self._across * angle.sin()) + phase)
        colours = torch.randn(3, 1, 1, generator=random)
        return colours * stripes + self.noise * torch.randn(3, SIZE, SIZE, generator=random), kind


class TextureDataModule(pl.LightningDataModule):
    """Nothing is downloaded; a picture of validation is none of training."""

    def __init__(
        self,
        num_train: int = 4096,
        num_val: int = 1024,
        batch_size: int = 64,
        noise: float = 2.0,
        seed: int = 1,
        num_workers: int = 0,
    ) -> None:
        """Set how many pictures there are.

        Args:
            num_train: pictures to train on.
            num_val: pictures to validate on.
            batch_size: pictures per rank and step; the global batch size is that times the ranks.
            noise: standard deviation of what is added; stripes have at most 1.
            seed: of all pictures.
            num_workers: processes that draw pictures; 0 draws them in the training process.
        """
        super().__init__()
        if min(num_train, num_val, batch_size) < 1:
            raise ConfigError(
                f"num_train={num_train}, num_val={num_val}, batch_size={batch_size}: all must be at least 1."
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train = Textures(num_train, 2 * seed, noise)
        self.val = Textures(num_val, 2 * seed + 1, noise)

    def train_dataloader(self) -> DataLoader:
        """Pictures in random order; an incomplete last batch is left out, for the sake of batch normalization."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        """Pictures in order."""
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what guessing reaches."""
        return {"guessing": {"val_accuracy": 1 / NUM_CLASSES}}

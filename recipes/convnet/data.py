"""CIFAR-10, or pictures of its shape that are made by seed: ten textures, each at a random place,
in random colours."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_distrec.errors import ConfigError

NUM_CLASSES = 10
SIZE = 32
# Mean and standard deviation of CIFAR-10's training pictures, by channel.
MEAN, DEVIATION = (
    torch.tensor([0.491, 0.482, 0.447]).view(3, 1, 1),
    torch.tensor([0.247, 0.243, 0.262]).view(3, 1, 1),
)
BORDER = 4
"""How far a picture of training is moved, at most."""


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
        stripes = torch.sin(
            fineness * (self._down * angle.cos() + self._across * angle.sin()) + phase
        )
        colours = torch.randn(3, 1, 1, generator=random)
        return colours * stripes + self.noise * torch.randn(3, SIZE, SIZE, generator=random), kind


class Cifar10(Dataset):
    """Pictures from CIFAR-10's binary files: records of a class and 3 x 32 x 32 bytes.

    Source of the format, and of the files: https://www.cs.toronto.edu/~kriz/cifar.html
    """

    def __init__(self, folder: Path, trains: bool, num_pictures: int) -> None:
        """trains: reads data_batch_1.bin to data_batch_5.bin, and moves and mirrors pictures; else
        test_batch.bin."""
        names = (
            [f"data_batch_{number}.bin" for number in range(1, 6)] if trains else ["test_batch.bin"]
        )
        self._trains = trains
        try:
            files = [
                np.fromfile(folder / name, dtype=np.uint8).reshape(-1, 1 + 3 * SIZE * SIZE)
                for name in names
            ]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data_dir='{folder}': {', '.join(names)} of CIFAR-10's binary version are needed "
                f"({error}). Unpack "
                "cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html there."
            ) from error
        records = torch.from_numpy(np.concatenate(files)[:num_pictures])
        self._kinds, self._pictures = records[:, 0].long(), records[:, 1:].view(-1, 3, SIZE, SIZE)

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the picture, (3, 32, 32) float32, and its class."""
        picture = (self._pictures[index] / 255 - MEAN) / DEVIATION
        if self._trains:
            down, across = torch.randint(2 * BORDER + 1, (2,)).tolist()
            picture = functional.pad(picture, [BORDER] * 4)[
                :, down : down + SIZE, across : across + SIZE
            ]
            picture = picture.flip(2) if torch.rand(()) < 0.5 else picture
        return picture, self._kinds[index]


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
        data_dir: str | None = None,
    ) -> None:
        """Set how many pictures there are.

        Args:
            num_train: pictures to train on.
            num_val: pictures to validate on.
            batch_size: pictures per rank and step; the global batch size is that times the ranks.
            noise: standard deviation of what is added; stripes have at most 1.
            seed: of all pictures.
            num_workers: processes that draw pictures; 0 draws them in the training process.
            data_dir: folder of CIFAR-10's binary files, whose first pictures are taken; None:
                pictures made by seed.
        """
        super().__init__()
        if min(num_train, num_val, batch_size) < 1:
            raise ConfigError(
                f"num_train={num_train}, num_val={num_val}, batch_size={batch_size}: all must be "
                "at least 1."
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train: Dataset = Textures(num_train, 2 * seed, noise)
        self.val: Dataset = Textures(num_val, 2 * seed + 1, noise)
        if data_dir is not None:
            self.train, self.val = (
                Cifar10(Path(data_dir), True, num_train),
                Cifar10(Path(data_dir), False, num_val),
            )

    def train_dataloader(self) -> DataLoader:
        """Pictures in random order; an incomplete last batch is left out, for the sake of batch
        normalization."""
        return self._load(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Pictures in order."""
        return self._load(self.val)

    def _load(self, pictures: Dataset, **options: bool) -> DataLoader:
        # Page-locked, batches go to a GPU while it computes.
        options["pin_memory"] = torch.cuda.is_available()
        return DataLoader(pictures, self.batch_size, num_workers=self.num_workers, **options)  # type: ignore[arg-type]

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what guessing reaches."""
        return {"guessing": {"val_accuracy": 1 / NUM_CLASSES}}

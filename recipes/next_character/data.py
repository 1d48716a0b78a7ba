"""The batches: windows of the text, each with the character that comes after every one of its
characters."""

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_distrec.errors import ConfigError
from recipes.next_character.baseline import pairs_log_loss
from recipes.next_character.text import encode, read_pages, split_pages


class Windows(Dataset):
    """A text split into consecutive windows of equal length; an incomplete last window is
    dropped."""

    def __init__(self, characters: Tensor, length: int) -> None:
        """characters: (num_characters,) int64. length: characters in a window."""
        self.characters = characters
        self.length = length

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window, (length,), and what comes next after each of its characters,
        (length,)."""
        start = index * self.length
        window = self.characters[start : start + self.length + 1]
        return window[:-1], window[1:]


class ManualDataModule(pl.LightningDataModule):
    """Python's own manual, by character; every eighth page validates. Nothing is downloaded."""

    def __init__(self, length: int = 64, batch_size: int = 16) -> None:
        """Set the lengths of windows and batches.

        Args:
            length: characters in a window.
            batch_size: windows per rank and step.
        """
        super().__init__()
        if length < 1 or batch_size < 1:
            raise ConfigError(f"length={length}, batch_size={batch_size}: both must be at least 1.")
        self.length = length
        self.batch_size = batch_size
        self.train: Windows
        self.val: Windows

    def setup(self, stage: str) -> None:
        """Read and split the text; every process does this, with the same result."""
        train, val = split_pages(read_pages())
        self.train, self.val = (
            Windows(encode(train), self.length),
            Windows(encode(val), self.length),
        )

    def train_dataloader(self) -> DataLoader:
        """Windows in random order."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Windows in the order of the text."""
        return DataLoader(self.val, self.batch_size)

    def baseline(self) -> float:
        """Return the validation log-loss of the pair baseline."""
        return pairs_log_loss(self.train.characters, self.val.characters)

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return the baseline's validation loss, for Report."""
        return {"pairs of characters": {"val_loss": self.baseline()}}

"""Makes examples with Criteo's columns and a planted truth, so that the best possible AUROC is
known.

Ids follow Zipf's law. Each id has an effect on the log-odds of a click and another on those of a
purchase, both drawn once by seed; some pairs of categories have an effect together, which a model
sees only through their interaction.
"""

from dataclasses import dataclass

import numpy as np

from recipes.criteo_dlrm.columns import MLPERF_ROWS, NUM_CATEGORIES, NUM_INTEGERS

TASKS = ("click", "purchase")
BLOCK = 65_536
"""Examples that are drawn from one seed, so that they do not depend on how many are asked for."""
ZIPF_EXPONENT = 1.05
MISSING_SHARE = 0.05
# Log-odds of an average example: a quarter are clicks, as in Criteo's data, and one of seven is a
# purchase.
BIAS = (-1.6, -2.4)
SCALE_OF_IDS = 0.35
SCALE_OF_PAIRS = 0.6
# Effects fade with the rank of an id: half as large at rank 600. A rare id is seen too seldom to be
# learned.
RANK_OF_FADING = 200
SCALE_OF_INTEGERS = 0.12
# Effects of purchases are partly those of clicks.
SHARED = 0.6
PAIRS = ((0, 9), (1, 19), (4, 20), (10, 21), (2, 14), (11, 3))


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some examples. N: at most BLOCK."""

    integers: np.ndarray
    """(N, 13) int64; -1 is missing."""
    tokens: np.ndarray
    """(N, 26) uint32: what Criteo writes as 8 hexadecimal digits; 0 is missing."""
    labels: np.ndarray
    """(N, 2) float32, 0 or 1: click, purchase."""
    log_odds: np.ndarray
    """(N, 2) float32: the truth that the labels were drawn by."""


class Generator:
    """Draws examples; the same seed gives the same ones on every machine."""

    def __init__(self, seed: int, max_ids: int) -> None:
        """max_ids: no category has more different ids. Raises ValueError: a negative seed."""
        self.seed = seed
        self.num_ids = np.minimum(MLPERF_ROWS, max_ids)
        random = np.random.default_rng([seed, 0])
        self._id_effects = [self._effects(random, int(count)) for count in self.num_ids]
        # What an id adds together with the id of its partner: the product of two such numbers.
        self._pair_effects = {
            category: (random.standard_normal(count) * _fading(count)).astype(np.float32)
            for pair in PAIRS
            for category in pair
            if (count := int(self.num_ids[category]))
        }
        self._integer_effects = SCALE_OF_INTEGERS * random.standard_normal((
            NUM_INTEGERS,
            len(TASKS),
        ))

    def block(self, number: int, size: int = BLOCK) -> Block:
        """Return the first `size` examples of a block; blocks are numbered from 0."""
        random = np.random.default_rng([self.seed, 1, number])
        ids = self._zipf(random.random((BLOCK, NUM_CATEGORIES)))
        missing = random.random((BLOCK, NUM_CATEGORIES)) < MISSING_SHARE
        integers = np.floor(random.lognormal(1.0, 1.5, (BLOCK, NUM_INTEGERS))).astype(np.int64)
        no_integer = random.random((BLOCK, NUM_INTEGERS)) < MISSING_SHARE
        log_odds = (
            np.array(BIAS) + np.log1p(np.where(no_integer, 0, integers)) @ self._integer_effects
        )
        for category, effects in enumerate(self._id_effects):
            log_odds += np.where(missing[:, category, None], 0, effects[ids[:, category]])
        for first, second in PAIRS:
            product = (
                self._pair_effects[first][ids[:, first]]
                * self._pair_effects[second][ids[:, second]]
            )
            log_odds += (
                SCALE_OF_PAIRS
                * np.where(missing[:, first] | missing[:, second], 0, product)[:, None]
            )
        labels = random.random(log_odds.shape) < 1 / (1 + np.exp(-log_odds))
        return Block(
            integers=np.where(no_integer, -1, integers)[:size],
            tokens=np.where(missing, 0, tokens_of(ids))[:size],
            labels=labels[:size].astype(np.float32),
            log_odds=log_odds[:size].astype(np.float32),
        )

    def _zipf(self, uniform: np.ndarray) -> np.ndarray:
        """Turn uniform numbers into ids; id k has a share of about 1 / (k + 1) ** ZIPF_EXPONENT."""
        power = 1 - ZIPF_EXPONENT
        ends = (self.num_ids + 1.0) ** power
        ranks = (1 - uniform * (1 - ends)) ** (1 / power)
        return np.minimum(ranks.astype(np.int64) - 1, self.num_ids - 1)

    @staticmethod
    def _effects(random: np.random.Generator, count: int) -> np.ndarray:
        """Return (count, 2) effects on click and purchase, which have a part in common."""
        noise = random.standard_normal((count, len(TASKS)))
        noise[:, 1] = SHARED * noise[:, 0] + np.sqrt(1 - SHARED**2) * noise[:, 1]
        return (SCALE_OF_IDS * _fading(count)[:, None] * noise).astype(np.float32)


def _fading(count: int) -> np.ndarray:
    return 1 / np.sqrt(1 + np.arange(count) / RANK_OF_FADING)


def tokens_of(ids: np.ndarray) -> np.ndarray:
    """Scatter (N, 26) ids over 32-bit tokens, as Criteo's hashing does; never 0.

    A multiplication by an odd number and exclusive-or shifts can be reversed, so different ids keep
    different tokens.
    """
    mixed = (ids * NUM_CATEGORIES + np.arange(NUM_CATEGORIES) + 1).astype(np.uint32)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> np.uint32(16))

"""What the ranks agree on about one lookup before its ids are sent: that all can send them, in one form.

It travels along with the sizes of the ids, or in one small all-reduce where these must be known before.
"""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import errors
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.request import LookupRequest

_TYPES = (None, torch.int64, torch.int32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_LEARNED = len(_TYPES)
NO_FORM = 0


def form_of(features: KeyedJaggedTensor, learns_weights: bool = False) -> int:
    """Return a number for what must be alike on all ranks: types of ids, lengths and weights, and equal batch sizes.

    learns_weights: whether the weights need a gradient; their type does not count then, float32 is sent.
    """
    weights = features.weights_or_none()
    of_weights = _NUMBERS[None if weights is None else weights.dtype]
    number = _NUMBERS[features.values().dtype] * 8 + _NUMBERS[features.lengths().dtype]
    return (number * 8 + (_LEARNED if learns_weights else of_weights)) * 2 + features.variable_stride_per_key()


def describe_form(form: int) -> str:
    """Return `form_of` in words."""
    rest, variable = divmod(form, 2)
    ids, lengths, of_weights = _TYPES[rest >> 6], _TYPES[rest >> 3 & 7], rest & 7
    weights = "no weights" if not of_weights else f"weights of {(*_TYPES, 'any type that need a gradient')[of_weights]}"
    words = [f"ids of {ids}", f"lengths of {lengths}", weights]
    return ", ".join(words + (["a batch size for each feature"] if variable else []))


class LookupConsensus:
    """What ranks agree on about each lookup of one collection.

    path: of the collection in the LightningModule.
    """

    def __init__(self, path: str, ranks: Ranks) -> None:
        self._path = path
        self._ranks = ranks

    def agree(self, request: LookupRequest) -> tuple[int, int]:
        """Collective. Return the minimum and maximum number of examples over ranks.

        Raises on every rank: what is wrong with the lookup on one of them; IdsError: their forms differ.
        """
        fine, examples, form = self._values(request)
        found = self._ranks.start_all_reduce_min(fine, examples, -examples, form, -form).wait()
        fine, smallest, negated, form, negated_form = found
        if not fine or form != -negated_form:
            self._raise(request)
        return smallest, -negated

    def values_to_send(self, request: LookupRequest) -> tuple[int, ...]:
        """Return what this rank sends along with its sizes, for `agree_on`."""
        return self._ranks.with_flags(*self._values(request))

    def agree_on(self, gathered: list[list[int]] | None, request: LookupRequest) -> tuple[int, int]:
        """Return as `agree` does, given every rank's values; None: nothing was exchanged, and ranks agree now."""
        if gathered is None:
            return self.agree(request)
        fine, examples, forms = zip(*self._ranks.take_flags(gathered), strict=True)
        if not all(fine) or len(set(forms)) > 1:
            self._raise(request)
        return min(examples), max(examples)

    def _values(self, request: LookupRequest) -> tuple[int, int, int]:
        return int(request.problem is None), request.num_examples, request.form

    def _raise(self, request: LookupRequest) -> None:
        problem = request.problem
        found = None if problem is None else (type(problem).__name__, str(problem))
        found_on_ranks = self._ranks.all_gather((found, request.form))
        for rank, (of_rank, _) in enumerate(found_on_ranks):
            if of_rank is None:
                continue
            if rank == self._ranks.rank and problem is not None:
                raise problem
            kind, text = getattr(errors, of_rank[0], None), of_rank[1]
            if kind is None:
                raise errors.RankError(f"rank {rank} failed in a lookup of '{self._path}': {of_rank[0]}: {text}")
            raise kind(text if kind is errors.IdsError else f"rank {rank}: {text}")
        of_ranks = "; ".join(f"rank {rank}: {describe_form(form)}" for rank, (_, form) in enumerate(found_on_ranks))
        raise errors.IdsError(
            f"ranks called '{self._path}' with ids that cannot be exchanged with each other: {of_ranks}. Give all "
            "ranks the same types, for example by .long() in the collate function."
        )

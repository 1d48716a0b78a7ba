"""What IdMapping.learn does, one id after the other, in Python's numbers."""

from typing import Any

import torch
from torch import Tensor

from lightning_distrec.sharding.mapping import id_mapping
from lightning_distrec.sharding.mapping.id_mapping import FREE, IdMapping

ROUNDS = 8


class LoopedMapping(IdMapping):
    """Learns by loops; the kernel says which row an id probes first."""

    def note_lookup(self, ids: Tensor) -> Tensor:
        self.looked_up = ids
        return ids[:0]

    def learn(self, numbers: Any) -> Tensor:
        spec, ids = self.spec, self.looked_up
        self.num_lookups += 1
        hour = id_mapping.current_hour()
        stamp = hour + spec.ttl_hours if spec.counts_hours else self.num_lookups
        initial = hour if spec.counts_hours else self.protected_from
        state = {name: tensor.flatten().tolist() for name, tensor in self._all()}
        stamps = dict.fromkeys(ids.tolist(), stamp)
        distinct, counted = torch.unique(ids, return_counts=True)
        firsts = self._probe(distinct, 1, may_share=True, among_own=True).tolist()
        probed = {
            i: self._probed(first) for i, first in zip(distinct.tolist(), firsts, strict=True)
        }
        sights = dict(zip(distinct.tolist(), counted.tolist(), strict=True))
        new = []
        for i, rows in probed.items():
            own_part = [row for row in rows if state["ids"][row] == i]
            if own_part:
                self._note(state, own_part[0], stamps[i], sights[i], False)
            else:
                new.append(i)
        waiting = self._enough(new, probed, sights, state)
        evicted: list[int] = []
        for _ in range(ROUNDS):
            selected = _one_each(waiting, lambda i: self._choice(probed[i], state, initial))
            evicted += [row for row in selected if state["ids"][row] != FREE]
            self._take(state, selected, stamps, sights, waiting)
        for name, tensor in self._all():
            tensor.view(-1).copy_(torch.tensor(state[name]))
        num_shared = sum(i not in state["ids"] for i in new)
        self._counts += torch.tensor([len(distinct), num_shared, len(evicted)])
        return torch.tensor(evicted, dtype=torch.int64)

    def _all(self) -> list[tuple[str, Tensor]]:
        names = ("ids", "used", "sights", "newcomers")
        return [(name, getattr(self, name)) for name in names if getattr(self, name).numel()]

    def _probed(self, first: int) -> list[int]:
        bucket, place = divmod(first, self.spec.bucket_rows)
        own_part = self.spec.own_rows
        return [
            bucket * self.spec.bucket_rows + (place + i) % own_part
            for i in range(min(self.spec.max_probe, own_part))
        ]

    def _enough(
        self, new: list[int], probed: dict[int, list[int]], sights: dict[int, int], state: Any
    ) -> list[int]:
        if self.spec.min_sights == 1:
            return list(new)
        counts = state["newcomers"]
        for i in new:
            counts[probed[i][0]] += sights[i]
        seen = {i: counts[probed[i][0]] for i in new}
        admitted = [i for i in new if seen[i] >= self.spec.min_sights]
        for i in admitted:
            counts[probed[i][0]], sights[i] = 0, seen[i]
        return admitted

    def _choice(self, rows: list[int], state: Any, initial: int) -> int | None:
        free = next((row for row in rows if state["ids"][row] == FREE), None)
        if free is not None or self.spec.policy == "none":
            return free
        old = [row for row in rows if state["used"][row] < initial]
        state_key = {"lfu": "sights", "lru": "used", "ttl_lru": "used"}.get(self.spec.policy)
        return min(old, key=lambda row: state[state_key][row] if state_key else 0, default=None)

    def _take(
        self,
        state: Any,
        selected: dict[int, int],
        stamps: dict[int, int],
        sights: dict[int, int],
        waiting: list[int],
    ) -> None:
        for row, i in selected.items():
            state["ids"][row] = i
            self._note(state, row, stamps[i], sights[i], True)
            waiting.remove(i)

    def _note(self, state: Any, row: int, stamp: int, sights: int, first_use: bool) -> None:
        state["used"][row] = stamp
        if "sights" in state:
            state["sights"][row] = sights + (0 if first_use else state["sights"][row])


def _one_each(waiting: list[int], expected: Any) -> dict[int, int]:
    """Return the rows that ids want, each with the first id that wants it."""
    selected: dict[int, int] = {}
    for i in waiting:
        if (row := expected(i)) is not None:
            selected.setdefault(row, i)
    return selected

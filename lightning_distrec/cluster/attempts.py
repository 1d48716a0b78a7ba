"""Which attempt of a job its ranks belong to, where the launcher's store outlives attempts.

torchrun counts restarts by node, and an agent that replaces a node begins at 0. So rank 0 draws an identity for each
attempt, and the others take it from the store once rank 0 has answered them: that of an earlier attempt, whose keys are
still there, does not.
"""

import secrets
from collections.abc import Callable, Iterable

from torch.distributed import Store

LATEST, HELLO = "latest", "hello"
ANSWER_PAUSES = 10
"""How often a rank looks for rank 0's answer before it looks for a later attempt."""


def identity_of_attempt(identity: str, rank: int, store_of: Callable[[str], Store], pause: Callable[[], None]) -> str:
    """Return an identity that this attempt of the job alone has.

    identity: of the job. store_of: returns the store of an identity. pause: called while rank 0 is waited for.
    """
    store = store_of(identity)
    if rank == 0:
        attempt = f"{identity} {secrets.token_hex(8)}"
        store.set(LATEST, attempt)
        return attempt
    nonce = secrets.token_hex(8)
    while True:
        while not store.check([LATEST]):
            pause()
        attempt = store.get(LATEST).decode()
        of_attempt = store_of(attempt)
        of_attempt.set(f"{HELLO}/{rank}", nonce)
        for _ in range(ANSWER_PAUSES):
            if of_attempt.check([f"{HELLO}/{rank}/{nonce}"]):
                return attempt
            pause()


def answer(store: Store, ranks: Iterable[int]) -> None:
    """Show ranks that ask that rank 0 of this attempt lives. store: of the attempt's identity."""
    for rank in ranks:
        if store.check([f"{HELLO}/{rank}"]):
            store.set(f"{HELLO}/{rank}/{store.get(f'{HELLO}/{rank}').decode()}", "")

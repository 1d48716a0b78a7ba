"""How long a test waits for what may never come: what is stuck ends some day, what is slow ends by
itself.

Machines that share their processors with others can be five times slower for minutes.
"""

LIMIT_SECONDS = 400
"""Less than pytest's own limit (pyproject.toml), so that who has not come is told, not only that
nobody came."""


def at_most(number: int) -> int:
    """Return the limit in seconds of so many things done one after the other."""
    return LIMIT_SECONDS + 30 * number

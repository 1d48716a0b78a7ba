"""Models of public packages, as they are published, are prefetched with the numbers of lookups as
they are called."""

from pathlib import Path

import pytest

from tests.support import published_models as models
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """The folder of the packages; skipped where the index cannot be reached."""
    folder = Path(request.config.cache.mkdir("published_models"))
    if problem := models.install(folder):
        pytest.skip(f"the package index cannot be reached: {problem}")
    return folder


@pytest.mark.parametrize("family", models.FAMILIES)
def test_published_models_are_prefetched_but_for_the_first_step_of_an_epoch(
    family: str, packages: Path
) -> None:
    for plain, ahead in run_on_ranks(models.fit_at_both_depths, 2, family, str(packages)):
        assert plain.keys() == ahead.keys()
        assert any(counts for _, counts in ahead.values())
        for name, (losses, _) in plain.items():
            losses_ahead, counts = ahead[name]
            assert losses_ahead == losses, name
            assert len(losses) == 3 * models.STEPS
            # all of its tables are replicated: their weights are read, or have one column
            if not counts:
                continue
            (earlier, ahead_before), (later, ahead_after) = counts[-2:]
            lookups_per_step = (later - earlier) // models.STEPS
            assert ahead_after - ahead_before >= lookups_per_step * (models.STEPS - 2), (
                name,
                counts,
            )

"""How batches reach the step. As in `sharding`, the versions are checked before torchrec is
loaded."""

from lightning_distrec.versions import require_matching_versions

require_matching_versions()

"""Where the inputs of tables come from in a batch, and whether a step calls with what was prefetched.

Importing anything from here loads torchrec, as `sharding` does, so the versions are checked first here too.
"""

from lightning_distrec.versions import require_matching_versions

require_matching_versions()

"""Module and topology in, sharded module out.

Importing anything from here loads torchrec and fbgemm; the versions are checked first, because a
mismatched triple fails inside of them with messages that do not say so.
"""

from lightning_distrec.versions import require_matching_versions

require_matching_versions()

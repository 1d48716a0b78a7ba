"""The part of the package's metadata that depends on where the project is published."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "REPOSITORY_URL"
"""The address of the repository, such as https://github.com/owner/name; a release sets it."""
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


class Publication(MetadataHookInterface):
    """Adds the readme and, with an address, the URLs. An index shows no relative links, so they get
    the address too."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `readme` and `urls`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get(VARIABLE, "").rstrip("/")
        if address:
            files = f"{address}/blob/v{metadata['version']}"
            text = RELATIVE_LINK.sub(rf"]({files}/\1)", text)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

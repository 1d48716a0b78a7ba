"""Adds pages of the repository's root to the site, as a hook of MkDocs: each has one source."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links from the place that they have in the site."""
    for name in PAGES:
        text = (ROOT / f"{name}.md").read_text("utf-8").replace("](docs/", "](")
        for other in PAGES:
            text = text.replace(f"]({other}.md)", f"]({other.lower()}.md)")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    return files

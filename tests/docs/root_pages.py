"""Adds pages to the site that have their source elsewhere, as a hook of MkDocs: those of the
repository's root, and the notebook, whose cells become a page."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")
NOTEBOOK = "notebook.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links from the place that they have in the site."""
    for name in PAGES:
        text = (ROOT / f"{name}.md").read_text("utf-8").replace("](docs/", "](")
        for other in PAGES:
            text = text.replace(f"]({other}.md)", f"]({other.lower()}.md)")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    text = page_of_notebook((ROOT / "docs" / NOTEBOOK).read_text("utf-8"))
    files.append(File.generated(config, "notebook.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the notebook's page, which alone links to the file."""
    if page.file.src_uri == "notebook.md":
        return markdown
    return markdown.replace(f"{NOTEBOOK})", "notebook.md)")


def page_of_notebook(text: str) -> str:
    """Return a notebook's cells as a page in Markdown, with a link to the file below the title."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
    title, _, others = "\n\n".join(parts).partition("\n\n")
    return f"{title}\n\n[Download this notebook]({NOTEBOOK}).\n\n{others}\n"

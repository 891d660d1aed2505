"""Add files from outside docs/ to the site, and point links of the pages to them."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: File in the repository -> page of the site.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "docker.md",
    "tests/README.md": "tests.md",
} | {f"examples/{path.name}": f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.py")}


def page_of(source: str) -> str:
    """Return the Markdown of the page for a file of the repository."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if not source.endswith(".py"):
        return text
    return f'# {Path(source).name}\n\n```python title="{source}"\n{text}```\n'


def on_files(files, config):
    """Add the pages."""
    from mkdocs.structure.files import File  # tests/test_docs.py reads PAGES without MkDocs

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=page_of(source)))
    return files


def on_page_markdown(markdown, page, **_):
    """Translate links between files of the repository into links between pages."""
    sources = {target: source for source, target in PAGES.items()}
    here = page.file.src_uri
    source = sources.get(here, f"docs/{here}")

    def translated(match):
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", translated, markdown)

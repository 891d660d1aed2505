"""The documentation, checked without building the site: pages, links, code and figures."""

import ast
import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import yaml

from hvdkit import exit_statuses

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "docker" / "README.md",
    ROOT / "tests" / "README.md",
    *PAGES,
]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)


def named(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """Return a guide without its code blocks; lines keep their numbers."""
    text = path.read_text(encoding="utf-8")
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)


def anchors(path):
    """Return the anchors of a guide's headings, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return found.keys() | {f"{a}-{i}" for a, n in found.items() for i in range(1, n + 1)}


def python_module(path):
    """Import a script by its path."""
    loader = SourceFileLoader(path.name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.name, loader))
    loader.exec_module(module)
    return module


def navigation():
    """Return the files that mkdocs.yml lists."""

    class Loader(yaml.SafeLoader):
        """Ignores Python objects, which only MkDocs needs."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            f
            for part in (entry.values() if isinstance(entry, dict) else entry)
            for f in files(part)
        ]

    return files(settings["nav"])


def test_every_page_is_in_the_navigation_once():
    generated = python_module(ROOT / "scripts" / "site" / "pages.py").PAGES
    pages = [str(path.relative_to(DOCS)) for path in PAGES] + [*generated.values()]
    assert sorted(navigation()) == sorted(pages)


@pytest.mark.parametrize("guide", GUIDES, ids=named)
def test_links_lead_to_files_and_headings(guide):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(guide)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (guide.parent / path).resolve() if path else guide
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_files_that_texts_name_by_their_paths_from_the_root_exist():
    path = re.compile(r"(?<![\w/.-])(?:hvdkit|tests|scripts|docs)/[a-z0-9_/.-]*[a-z0-9_]\b")
    folders = [ROOT / name for name in ("hvdkit", "tests", "scripts")]
    broken = [
        f"{named(file)}: {name}"
        for file in [*GUIDES, *(file for folder in folders for file in folder.rglob("*.py"))]
        for name in path.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not broken


@pytest.mark.parametrize("guide", [DOCS / "architecture.md", ROOT / "tests/README.md"], ids=named)
def test_files_that_a_page_about_the_code_names_exist(guide):
    """These pages shorten paths, such as `control/job.py`."""
    folders = [ROOT / name for name in ("hvdkit", "tests")]
    files = [f"/{named(file)}" for folder in folders for file in (folder, *folder.rglob("*"))]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", prose(guide))
    assert names
    assert not [
        name for name in names if not any(f.endswith(f"/{name.rstrip('/')}") for f in files)
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=named)
def test_python_blocks_compile(guide):
    for block in FENCE.finditer(guide.read_text(encoding="utf-8")):
        if block[2] == "python":
            code = re.sub(rf"^{block[1]}", "", block[3], flags=re.M)
            line = guide.read_text(encoding="utf-8")[: block.start()].count("\n") + 1
            ast.parse(code, f"{named(guide)}, the block in line {line}")


@pytest.mark.parametrize("guide", GUIDES, ids=named)
def test_lists_and_tables_follow_an_empty_line(guide):
    """Without one, MkDocs shows a list or a table as a part of the paragraph."""
    lines = prose(guide).splitlines()
    starts = re.compile(r"(- |\d+\. |\|)")
    wrong = [
        f"line {i + 1}: {line}"
        for i, line in enumerate(lines)
        if starts.match(line)
        and i > 0
        and lines[i - 1].strip()
        and not lines[i - 1].startswith((" ", "#"))
        and not starts.match(lines[i - 1])
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["torch", "keras", "tensorflow"])
def test_the_api_reference_has_every_public_name(module):
    tree = ast.parse((ROOT / "hvdkit" / module / "__init__.py").read_text(encoding="utf-8"))
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    reference = "".join(
        (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8") for page in (module, "checkpoint")
    )
    missing = [name for name in public if not re.search(rf"[.`]{name}\b", reference)]
    assert not missing


def test_the_picture_shows_the_figures_of_the_benchmarks():
    drawn = python_module(ROOT / "scripts" / "plot_benchmarks").draw(
        (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    )
    picture = DOCS / "images" / "benchmarks.svg"
    assert picture.read_text(encoding="utf-8") == drawn, "run scripts/plot_benchmarks"


def test_the_page_of_rules_is_up_to_date():
    written = python_module(ROOT / "scripts" / "migration_rules").page()
    page = DOCS / "migration-rules.md"
    assert page.read_text(encoding="utf-8") == written, "run scripts/migration_rules"


def test_each_exit_status_of_a_job_is_described():
    section = prose(DOCS / "settings.md").partition("## Exit statuses")[2]
    cells = re.findall(r"^\| ([\d, ]+) \|", section, re.M)
    described = {int(text) for cell in cells for text in cell.split(",")}
    # Ranks of elastic jobs only.
    assert {row.value for row in exit_statuses.TABLE.values() if not row.elastic} <= described

"""Put what lies beside docs/ into the site.

The README is the start page. A file of the repository that a page links to gets a page of its own:
Markdown as it is, any other file as a listing. So every link works offline, from a folder. A page
that would load a script, a style or a picture from elsewhere is an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"<(?:script|img|iframe)[^>]* src=.?https?://[^ >]*")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_source_of: dict[str, str] = {}  # a page of the site -> its file in the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and every file that can be reached from a page."""
    _source_of.clear()
    for file in files.documentation_pages():
        _source_of[file.src_uri] = f"docs/{file.src_uri}"
    waiting = ["README.md"]
    waiting += [target for source in _source_of.values() for target in _targets(source)]
    while waiting:
        source = waiting.pop()
        if _page_of(source) in _source_of or source.startswith("docs/"):
            continue
        _source_of[_page_of(source)] = source
        files.append(_file(source, config))
        waiting += _targets(source)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the site's pages."""
    here = page.file.src_uri
    source = _source_of.get(here)
    if source is None or not source.endswith(".md"):
        return markdown

    def moved(match: re.Match[str]) -> str:
        target, sharp, part = match[2].partition("#")
        path = _resolved(source, target)
        if path is None or not (ROOT / path).is_file():
            return match[0]
        link = os.path.relpath(_page_of(path), PurePosixPath(here).parent)
        return f"{match[1]}{PurePosixPath(link)}{sharp}{part}{match[3]}"

    return LINK.sub(moved, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that needs a network."""
    if found := ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output


def _file(source: str, config: MkDocsConfig) -> File:
    """Return a file of the site that is made from one of the repository."""
    path = ROOT / source
    page = _page_of(source)
    level = InclusionLevel.NOT_IN_NAV
    if source == "README.md":
        level = InclusionLevel.INCLUDED
    if path.suffix == ".md":
        return File.generated(config, page, abs_src_path=str(path), inclusion=level)
    kind = {".py": "python", ".sh": "bash", ".toml": "toml"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    unsearched = "---\nsearch: {exclude: true}\n---\n"
    content = f"{unsearched}# {source}\n\n````{kind}\n{text}\n````\n"
    return File.generated(config, page, content=content, inclusion=level)


def _page_of(source: str) -> str:
    """Return where a file of the repository stands in the site."""
    if source == "README.md":
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.endswith(".md"):
        return source
    return f"{source}.md"


def _targets(source: str) -> list[str]:
    """Return the files of the repository that a Markdown file links to."""
    if not source.endswith(".md"):
        return []
    text = (ROOT / source).read_text(encoding="utf-8")
    paths = (_resolved(source, match[2].partition("#")[0]) for match in LINK.finditer(text))
    return [path for path in paths if path is not None and (ROOT / path).is_file()]


def _resolved(source: str, target: str) -> str | None:
    """Return a link's target as a path in the repository; None for one that leads outside."""
    if not target or ":" in target:
        return None
    path = (ROOT / source).parent.joinpath(target).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None

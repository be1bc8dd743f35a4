"""Links from a page to a file of the repository (../examples/demo.py) work in the site too: the file is copied into it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FOLDER = "source"
"""Where in the site the copies lie."""
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def outside(page: str, link: str) -> str | None:
    """The path in the repository of a link that leaves docs/; None for one that stays there."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path


def copy_of(path: str) -> str:
    """Its name in the site. A Markdown file would become a page that is not in the navigation."""
    return f"{FOLDER}/{path}.txt" if path.endswith(".md") or "." not in path else f"{FOLDER}/{path}"


def on_files(files: Files, config: Any) -> Files:
    wanted: set[str] = set()
    for file in files.documentation_pages():
        links = (link[2] for link in LINK.finditer(file.content_string))
        wanted |= {path for link in links if (path := outside(file.src_uri, link)) is not None}
    for path in sorted(wanted):
        files.append(File.generated(config, copy_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    def moved(link: re.Match[str]) -> str:
        path = outside(page.file.src_uri, link[2])
        if path is None:
            return link[0]
        return link[1] + posixpath.relpath(copy_of(path), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)

"""MkDocs hook: pages outside docs/, the notebook, and links that work in the site and on GitHub.

A page's links are written relative to its place in the repository. A link to a page of the site
leads there; a link to any other file of the repository leads to a copy of it in the site.
"""

import json
import os.path
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

#: Pages by their path in the repository; each has the same path in the site, but for the README.
OUTSIDE = {
    "README.md": "index.md",
    **{
        path: path
        for path in (
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "benchmarks/engine-notes.md",
            "dashboards/README.md",
            "demo_model/README.md",
            "deploy/README.md",
            "deploy/kubernetes/README.md",
            "deploy/salad/README.md",
            "deploy/skypilot/README.md",
            "deploy/slurm/README.md",
        )
    },
}

#: A notebook and its page. Links to the notebook lead to the page.
NOTEBOOK = "docs/client.ipynb"
NOTEBOOK_PAGE = "notebook.md"

_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    notebook = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))
    page = "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=page))
    return files


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    """A notebook's cell in Markdown, with what it has printed and shown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        if "image/jpeg" in shown:
            jpeg = "".join(shown["image/jpeg"]).strip()
            yield f'<img alt="" src="data:image/jpeg;base64,{jpeg}">'
        elif "text/html" in shown:
            yield "".join(shown["text/html"])
        else:
            yield f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    source = _repository_path(page.file.src_uri)

    def in_site(match: re.Match[str]) -> str:
        link = urlsplit(match[0])
        if link.scheme or not link.path:
            return match[0]
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(source), link.path)
        )
        uri = _site_path(target)
        if files.get_file_from_path(uri) is None:
            if not (ROOT / target).is_file():
                raise PluginError(f"{source} links to {match[0]}, which is no file")
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
        relative = os.path.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return relative + (f"#{link.fragment}" if link.fragment else "")

    pieces = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(in_site, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(in_site, markdown[end:])])


def _repository_path(uri: str) -> str:
    pages = {page: path for path, page in OUTSIDE.items()} | {NOTEBOOK_PAGE: NOTEBOOK}
    return pages.get(uri, f"docs/{uri}")


def _site_path(path: str) -> str:
    pages = OUTSIDE | {NOTEBOOK: NOTEBOOK_PAGE}
    return pages.get(path, path.removeprefix("docs/"))

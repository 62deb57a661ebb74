"""Hooks of the site's build."""

import re
from typing import Any

_titles: dict[str, str] = {}


def on_nav(nav: Any, **_: Any) -> None:
    """Note the titles of the pages in the navigation."""
    _titles.update((page.file.src_uri, page.title) for page in nav.pages if page.title)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Label links that have the name of a file, which is what a repository shows, with the page's title."""
    return re.sub(r"\[([\w-]+\.md)\](?=\(\1)", lambda link: f"[{_titles.get(link[1], link[1])}]", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replace the script that the search would load from the network by the one of this site."""
    root = "../" * page.url.count("/")
    script = f'<script src="{root}site/search_from_files.js">'
    return re.sub(r'<script src="https://unpkg\.com/iframe-worker/shim">', script, output)

"""A file from the Python package index without pip (environments made by uv have none).

The simple repository API (PEP 503 and 691): a page of links, as JSON or HTML.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import rich.progress

TIMEOUT = 15.0  # seconds without a byte
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_HREF = re.compile(r"""<a\b[^>]*\bhref\s*=\s*["']([^"']+)["']""", re.IGNORECASE)


def index_url() -> str:
    """The user's package index, as uv and pip name it in the environment."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name]
    return "https://pypi.org/simple"


def find_url(package: str, filename: str) -> str:
    """The address of a file of a package. OSError if the index has no such file."""
    page = f"{index_url().rstrip('/')}/{package}/"
    request = urllib.request.Request(page, headers={"Accept": _ACCEPT})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        kind, text = response.headers.get_content_type(), response.read().decode()
        base = response.url
    if kind.endswith("+json"):
        links = [file["url"] for file in json.loads(text)["files"]]
    else:
        links = [html.unescape(link) for link in _HREF.findall(text)]
    for link in links:
        url = urllib.parse.urljoin(base, link)
        if Path(urllib.parse.urlparse(url).path).name == filename:
            return url
    raise FileNotFoundError(f"{page} has no {filename}")


def download(package: str, filename: str, target: Path) -> None:
    """Downloads a file of a package to `target`, with a progress bar on a terminal's stderr."""
    url = find_url(package, filename)
    console = rich.console.Console(file=sys.stderr)
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response, target.open("wb") as out:
        size = int(response.headers.get("Content-Length") or 0) or None
        with rich.progress.wrap_file(
            response,
            size or 0,
            description=filename,
            console=console,
            disable=not console.is_terminal,
        ) as source:
            while block := source.read(1 << 20):
                out.write(block)
    got = target.stat().st_size
    if size is not None and got != size:
        raise ConnectionError(f"the download ended after {got} of {size} bytes")

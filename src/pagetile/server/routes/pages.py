"""``/pages``: the live block pool, as a web page and as a stream of snapshots."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from ..body import described
from ..errors import ApiError
from ..state import server_of
from ..streaming import EventStream

router = APIRouter()
_STATIC = Path(__file__).parent.parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/pages", **described(), response_class=Response)
async def page() -> Response:
    """The page that draws every block of the cache, live."""
    return _file("pages.html")


@router.get("/pages/frames", **described(), response_class=Response)
async def frames(request: Request) -> Response:
    """Snapshots of the pool as server-sent events, at most five a second."""
    server = server_of(request)

    async def events() -> AsyncIterator[bytes]:
        async for frame in server.pages.frames():
            yield b"data: %b\n\n" % frame

    return EventStream(events(), send_seconds=server.limits.send_seconds)


@router.get("/pages/{name}", **described(), response_class=Response)
async def static_file(name: str) -> Response:
    """The page's modules and styles."""
    return _file(name)


def _file(name: str) -> Response:
    path = _STATIC / name
    # One path segment comes here, and it must be the name of a file that ships with the page.
    if path.parent != _STATIC or path.suffix not in _TYPES or not path.is_file():
        raise ApiError(404, f"there is no /pages/{name}")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)

"""ASGI middleware around all routes: request id, size limits, API key, log line.

Plain ASGI, not Starlette's ``BaseHTTPMiddleware``: that would hide a client's disconnection.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import Limits
from .errors import ApiError, to_api_error
from .logs import log
from .streaming import ClientGone

OPEN_PATHS = ("/health",)
CLIENT_GONE = 499  # nginx's status for a client that disconnected before the response; for the log
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class ApiKeys:
    """The accepted API keys, compared in constant time, and a cache salt for each.

    Args:
        keys: The keys; empty: no key is needed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    @property
    def is_open(self) -> bool:
        """Return whether no key is needed."""
        return not self._digests

    def find(self, authorization: bytes) -> int | None:
        """Return the number of the key in an Authorization header; ``None`` if it has no valid one.

        The time it takes does not depend on which key it is, nor on how much of it is right.
        """
        digest = self._digest(_shown_key(authorization))
        found = None
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = number
        return found

    def cache_salt(self, key: int | None, chosen: str | None) -> str | None:
        """Return the salt that separates the cached prefixes of a key's requests from all others.

        No client can choose another key's salt: it is a keyed hash with a secret of the process.

        Args:
            key: The number of the request's key.
            chosen: The request's own ``cache_salt``, which separates it further.
        """
        if key is None and chosen is None:
            return None
        data = b"%d\0" % (-1 if key is None else key) + (chosen or "").encode()
        data += b"\1" if chosen is not None else b"\0"
        return hmac.new(self._secret, data, hashlib.sha256).hexdigest()

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._secret, key, hashlib.sha256).digest()


def _shown_key(authorization: bytes) -> bytes:
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":  # of a browser that opens /pages: the password is the key
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


class Gate:
    """The outermost application: assigns request ids, checks sizes and keys, and logs."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        headers = dict(scope["headers"])
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(headers)
        fields: dict[str, Any] = {}
        state["log"] = fields
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope, headers, state)
            await self._app(scope, self._limited(receive), send_with_id)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:
            found = to_api_error(error)
            if found.status >= 500:
                log.error("request failed", request=scope, exc=error)
            if has_started:
                raise  # the response has begun, so the connection is closed instead
            await found.response()(scope, receive, send_with_id)
        finally:
            if scope["path"] not in ("/health", "/metrics", "/ready"):
                log.info(
                    "request",
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round((time.perf_counter() - start) * 1e3, 1),
                    **fields,
                )

    def _check(self, scope: Scope, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        limits = self._limits
        if len(scope["headers"]) > limits.num_headers:
            raise ApiError(
                431, f"{len(scope['headers'])} headers, at most {limits.num_headers} are accepted"
            )
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > limits.header_bytes:
            raise ApiError(
                431, f"{size} bytes of headers, at most {limits.header_bytes} are accepted"
            )
        state["key"] = None
        if not self._keys.is_open and scope["path"] not in OPEN_PATHS:
            # A browser asks before it sends another site's request, and cannot show a key then;
            # CORS answers that itself, outside of this check.
            key = self._keys.find(headers.get(b"authorization", b""))
            if key is None:
                raise ApiError(
                    401,
                    "this server needs an API key: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": 'Bearer, Basic realm="pagetile"'},
                )
            state["key"] = key
            state["log"]["key"] = key
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limits.body_bytes:
            raise _too_large(limits)

    def _limited(self, receive: Receive) -> Receive:
        """Refuse a body that exceeds the limit, whatever its headers say."""
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.body_bytes:
                raise _too_large(self._limits)
            return message

        return receive_some


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limits.body_bytes} bytes: send less, or start the server with "
        "a larger --max-body-bytes",
    )


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)

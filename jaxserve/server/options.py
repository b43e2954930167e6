"""How a request wants to be treated among others: RequestOptions, from its headers and its body.

The tenant, who is charged for the tokens, is the first of: the header X-Tenant-Id, a short name
made from the API key (Authorization: Bearer), the body's `user`, nobody. The deadline is the body's
`timeout` or the header X-Request-Timeout, in seconds; the body wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web

from jaxserve.server.fields import Fields, short
from scheduler.errors import InvalidParameter
from scheduler.request import MAX_NAME, MAX_TIMEOUT, RequestOptions

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?", re.IGNORECASE)
_TENANT = re.compile(rf"[\x20-\x7e]{{1,{MAX_NAME}}}")
_PRIORITIES = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers tell. The API key itself goes no further than read_caller."""

    tenant: str | None  # None: neither a header nor a key names one
    timeout: float | None  # seconds


def read_caller(request: web.Request) -> Caller:
    """InvalidParameter names the header."""
    tenant = _header(request, "X-Tenant-Id")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise InvalidParameter("X-Tenant-Id", f"must be 1 to {MAX_NAME} printable ASCII characters")
    key = _BEARER.fullmatch(request.headers.get("Authorization", ""))
    if tenant is None and key is not None:
        tenant = "key-" + sha256(key[1].encode("utf-8", "surrogateescape")).hexdigest()[:16]
    given = _header(request, "X-Request-Timeout")
    if given is None:
        return Caller(tenant, None)
    if not _DECIMAL.fullmatch(given):
        raise InvalidParameter(
            "X-Request-Timeout",
            f"must be a number of seconds, such as 30 or 2.5, got {short(given)}",
        )
    timeout = float(given)
    _check_seconds("X-Request-Timeout", timeout)
    return Caller(tenant, timeout)


def read_options(fields: Fields, caller: Caller) -> RequestOptions:
    """Take timeout, priority, user, cache_salt and profile. InvalidParameter names the field."""
    timeout = fields.number("timeout")
    if timeout is not None:
        _check_seconds("timeout", timeout)
    user = _name(fields, "user")
    cache_salt = _name(fields, "cache_salt")
    if cache_salt == "":  # who made one by mistake would share with everybody
        raise InvalidParameter("cache_salt", "must not be empty")
    return RequestOptions(
        priority=fields.integer("priority", *_PRIORITIES) or 0,
        tenant=(user or "") if caller.tenant is None else caller.tenant,
        profile=_name(fields, "profile") or "",
        timeout=caller.timeout if timeout is None else timeout,
        cache_salt=cache_salt or "",
    )


def _header(request: web.Request, name: str) -> str | None:
    """Sent twice, it would be anybody's guess which one counts."""
    values = request.headers.getall(name, [])
    if len(values) > 1:
        raise InvalidParameter(name, f"must be sent once, got {len(values)} headers")
    return values[0] if values else None


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value <= MAX_TIMEOUT:
        raise InvalidParameter(
            name, f"must be more than 0 and at most {MAX_TIMEOUT:g} seconds, got {short(value)}"
        )


def _name(fields: Fields, name: str) -> str | None:
    value = fields.text(name)
    if value is not None and len(value) > MAX_NAME:
        raise InvalidParameter(name, f"must have at most {MAX_NAME} characters, got {len(value)}")
    return value

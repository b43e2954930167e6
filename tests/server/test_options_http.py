"""Deadline, priority, tenant, profile and cache salt: from headers and body to the engine."""

import hashlib

import pytest

from scheduler.request import RequestOptions

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKS = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
BIG = 2**31


async def options_of(running, fields=(), headers=None, path=COMPLETIONS):
    status, body = await running.post(path, ASKS[path] | dict(fields), headers=headers)
    assert status == 200, body
    return running.engine.options[-1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_field_arrives(start, path):
    running = await start()
    fields = {
        "timeout": 2.5,
        "priority": -3,
        "user": "ann",
        "profile": "summaries",
        "cache_salt": "pepper",
    }
    assert await options_of(running, fields, path=path) == RequestOptions(
        priority=-3, tenant="ann", profile="summaries", timeout=2.5, cache_salt="pepper"
    )


async def test_nothing_is_the_default(start):
    running = await start()
    absent = dict.fromkeys(("timeout", "priority", "user", "profile", "cache_salt"))
    assert await options_of(running) == RequestOptions()
    assert await options_of(running, absent) == RequestOptions()


@pytest.mark.parametrize(
    ("header", "seconds"), [("30", 30.0), ("2.5", 2.5), (".5", 0.5), ("1e1", 10.0), ("1e6", 1e6)]
)
async def test_the_timeout_header(start, header, seconds):
    running = await start()
    headers = {"X-Request-Timeout": header}
    assert (await options_of(running, headers=headers)).timeout == seconds
    assert (await options_of(running, {"timeout": 7}, headers)).timeout == 7


BAD = [
    *(("timeout", value) for value in (0, -1, -0.0, 1e30, 10**400, 1_000_001, "1", True, [1], {})),
    *(("priority", value) for value in (1.5, True, "1", BIG, -BIG - 1, 10**400, [0])),
    *(("cache_salt", value) for value in ("", "x" * 257, "x" * 10**6, 5, ["a"], True)),
    *(("profile", value) for value in ("x" * 257, 5, {"a": 1})),
    *(("user", value) for value in ("x" * 257, 5)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:12])
async def test_bad_values_are_400_and_named(start, name, value):
    running = await start()
    status, body = await running.post(COMPLETIONS, {"prompt": "a", name: value})
    assert status == 400
    assert (body["error"]["param"], body["error"]["code"]) == (name, "invalid_value")
    assert body["error"]["message"].startswith(f"{name}: must ")
    assert running.engine.ids == []


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
async def test_a_timeout_beyond_floats(start, number):
    running = await start()
    async with running.http.post(
        running.url + COMPLETIONS,
        data=f'{{"prompt": "a", "timeout": {number}}}',
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "timeout"


@pytest.mark.parametrize("with_body", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("X-Request-Timeout", value)
            for value in ("", "soon", "0", "-1", "-0.0", "1e30", "1e999")
        ),
        *(("X-Request-Timeout", value) for value in ("nan", "inf", "1_0", "0x10", "1 2", "30s")),
        *(("X-Request-Timeout", value) for value in ("1,5", "٣", ".", "e5", "9" * 5000)),
        *(("X-Tenant-Id", value) for value in ("", "x" * 257, "café", "a\tb")),
    ],
)
async def test_bad_headers_are_400_and_named(start, name, value, with_body):
    """Also where the body's own field would win."""
    running = await start()
    fields = {"timeout": 5, "user": "ann"} if with_body else {}
    status, body = await running.post(COMPLETIONS, {"prompt": "a"} | fields, headers={name: value})
    assert status == 400
    assert (body["error"]["param"], body["error"]["code"]) == (name, "invalid_value")
    assert running.engine.ids == []


@pytest.mark.parametrize("name", ["X-Request-Timeout", "X-Tenant-Id"])
async def test_a_header_sent_twice_is_refused(start, name):
    """A gateway adds its own behind the client's: neither may quietly win."""
    running = await start()
    headers = [(name, "1"), (name, "2")]
    status, body = await running.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
    assert (status, body["error"]["param"]) == (400, name)
    assert running.engine.ids == []


def key_name(key):
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("headers", "user", "tenant"),
    [
        ({}, None, ""),
        ({}, "ann", "ann"),
        ({}, "", ""),
        ({"Authorization": "Bearer sk-1"}, "ann", key_name("sk-1")),
        ({"Authorization": "bearer  sk-1"}, None, key_name("sk-1")),
        ({"Authorization": "Bearer"}, "ann", "ann"),
        ({"Authorization": "Basic YTpi"}, "ann", "ann"),
        ({"Authorization": "Bearer sk-1", "X-Tenant-Id": "Acme Ltd"}, "ann", "Acme Ltd"),
        ({"X-Tenant-Id": "x" * 256}, None, "x" * 256),
    ],
)
async def test_the_tenant_is_the_first_that_is_named(start, headers, user, tenant):
    running = await start()
    assert (await options_of(running, {"user": user}, headers)).tenant == tenant


async def test_two_keys_are_two_tenants_and_neither_is_told(start, caplog):
    running = await start()
    caplog.set_level("DEBUG")
    tenants = [
        (await options_of(running, headers={"Authorization": f"Bearer sk-secret-{i}"})).tenant
        for i in range(2)
    ]
    assert tenants[0] != tenants[1]
    assert not any("secret" in tenant for tenant in tenants)
    assert "secret" not in caplog.text

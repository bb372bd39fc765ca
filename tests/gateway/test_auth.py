"""API keys over HTTP: who gets in, what the others are told, whose request it is, and that no key is shown."""

from __future__ import annotations

import asyncio

import openai
import pytest

from pdq.errors import ConfigError
from pdq.gateway import auth

from .fakes import MODEL, TEXT
from .helpers import CHAT, COMPLETIONS, chat, completion, error

KEY = "sk-right-3a7"


def bearer(key=KEY):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "WATCH_SECONDS", 0.01)
    found = tmp_path / "keys"
    found.write_text("acme sk-acme-1\nacme:sk-acme-2\nbolt sk-bolt-1\nsk-lone-1\n")
    return found


async def refused(response):
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    found = await error(response)
    assert (found["type"], found["param"], found["code"]) == ("invalid_request_error", None, "invalid_api_key")
    return found["message"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"}, {"X-Api-Key": KEY}],
)
async def test_without_a_key_it_is_said_how_to_send_one(start, fake, headers):
    http = await start(api_key=KEY)
    message = await refused(await http.post(CHAT, json=chat(), headers=headers))
    assert message == "An API key is needed: send it in the header 'Authorization: Bearer KEY'."
    assert fake.asked == []


@pytest.mark.parametrize("key", ["sk-wrong", KEY[:-1], f"{KEY}x", f"{KEY} x", KEY.upper(), "sk-\u00e9"])
async def test_a_wrong_key_is_refused_and_not_repeated(start, fake, caplog, key):
    caplog.set_level("DEBUG")
    http = await start(api_key=KEY)
    message = await refused(await http.post(CHAT, json=chat(), headers=bearer(key)))
    assert message == "The API key is not valid."
    assert fake.asked == []
    assert not [r for r in caplog.messages if key in r]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER  "])
async def test_the_right_key_is_served_and_not_logged(start, fake, caplog, scheme):
    caplog.set_level("DEBUG")
    http = await start(api_key=KEY)
    response = await http.post(f"{CHAT}?api_key={KEY}", json=chat(), headers={"Authorization": f"{scheme} {KEY}"})
    assert (await response.json())["choices"][0]["message"]["content"] == TEXT
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("pdq")]
    assert [m for m in ours if m.startswith(f"POST {CHAT} 200 ")]
    assert not [m for m in ours if KEY in m]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", CHAT),
        ("GET", "/v1/nothing"),
        ("GET", "/%76%31/models"),
    ],
)
async def test_every_path_but_the_probes_needs_the_key(start, method, path):
    http = await start(api_key=KEY)
    await refused(await http.request(method, path))
    assert (await http.request(method, path, headers=bearer(), json=chat())).status != 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(start, path):
    http = await start(api_key=KEY)
    assert (await http.get(path)).status == 200
    assert (await http.get(path, headers=bearer("sk-wrong"))).status == 200


async def test_a_body_is_not_read_for_somebody_without_a_key(start):
    http = await start(api_key=KEY)
    reader, writer = await asyncio.open_connection(http.host, http.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_without_keys_everybody_is_served_as_nobody_in_particular(http, fake):
    assert (await http.post(CHAT, json=chat(), headers=bearer("any"))).status == 200
    assert fake.asked[0].options["tenant"] == ""


async def test_a_key_stands_for_its_tenant_whatever_the_body_says(start, fake, file):
    http = await start(api_keys_file=str(file))
    for key in ("sk-acme-1", "sk-acme-2", "sk-bolt-1", "sk-lone-1"):
        body = chat(tenant="bolt", user="bolt", prompt_cache_key="bolt")
        assert (await http.post(CHAT, json=body, headers=bearer(key))).status == 200
    one, two, other, lone = (a.options["tenant"] for a in fake.asked)
    assert (one, two, other) == ("acme", "acme", "bolt")
    assert lone not in ("", "acme", "bolt")
    assert all("cache_salt" not in a.options for a in fake.asked)


async def test_caching_is_as_the_body_says_and_on_by_default(http, fake):
    await http.post(CHAT, json=chat(cache="off", cache_salt="mine"))
    await http.post(COMPLETIONS, json=completion(cache="on"))
    await http.post(CHAT, json=chat(cache=None, cache_salt=None))
    found = [{k: v for k, v in a.options.items() if k.startswith("cache")} for a in fake.asked]
    assert found == [{"cache": "off", "cache_salt": "mine"}, {"cache": "on"}, {}]


async def test_the_openai_client_sends_the_key_and_knows_the_refusal(start):
    http = await start(api_key=KEY)
    url = f"http://{http.host}:{http.port}/v1"
    messages = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == TEXT
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.code == "invalid_api_key"


async def until(http, key, status):
    async with asyncio.timeout(5):
        while (await http.get("/v1/models", headers=bearer(key))).status != status:
            await asyncio.sleep(0.01)


async def test_a_changed_file_counts_without_a_restart(start, file):
    http = await start(api_keys_file=str(file))
    await until(http, "sk-acme-1", 200)
    file.write_text("acme sk-new-1\n")
    await until(http, "sk-new-1", 200)
    assert (await http.get("/v1/models", headers=bearer("sk-acme-1"))).status == 401


async def test_a_broken_file_keeps_the_keys_and_is_logged(start, file, caplog):
    http = await start(api_keys_file=str(file))
    file.write_text("acme sk-new-1 and more\n")
    async with asyncio.timeout(5):
        while "the keys read before stay valid" not in caplog.text:
            await asyncio.sleep(0.01)
    await until(http, "sk-acme-1", 200)
    assert (await http.get("/v1/models", headers=bearer("sk-new-1"))).status == 401
    assert "sk-new-1" not in caplog.text
    file.write_text("acme sk-new-1\n")
    await until(http, "sk-new-1", 200)


async def test_without_a_key_in_its_file_no_gateway_starts(start, file):
    file.write_text("# to come\n")
    with pytest.raises(ConfigError, match="holds no keys"):
        await start(api_keys_file=str(file))

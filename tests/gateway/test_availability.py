"""What clients and probes are told when there is no Redis, no worker, or no room."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from pdq.errors import IdConflict, QueueFull, Unavailable
from pdq.gateway import pool
from pdq.gateway.errors import NoWorker

from .fakes import CONTEXT, MODEL, both, worker
from .helpers import CHAT, COMPLETIONS, chat, completion, error

DOWN = Unavailable("Redis does not answer: Error 111 connecting to 10.0.0.7:6379", retry_after=2.0)
NOT_SERVING = [
    ([], "No live prefill and no live decode worker serves 'org/test-model'."),
    ([worker("prefill")], "No live decode worker serves 'org/test-model'."),
    ([worker("decode")], "No live prefill worker serves 'org/test-model'."),
    ([worker("prefill", state="draining"), worker("decode")], "No live prefill worker serves 'org/test-model'."),
    (
        [worker("prefill", model="b"), worker("decode", model="b")],
        "No live prefill and no live decode worker serves 'org/test-model'. This pool's workers serve 'b'.",
    ),
]


@pytest.mark.parametrize(("workers", "message"), NOT_SERVING)
@pytest.mark.parametrize("body", [chat(), chat(stream=True)])
async def test_without_a_worker_for_a_stage_nothing_is_queued(http, fake, workers, message, body):
    fake.workers_now = workers
    response = await http.post(CHAT, json=body)
    assert response.status == 503
    assert response.headers["Retry-After"] == "2"
    assert await error(response) == {
        "message": message, "type": "service_unavailable", "param": None, "code": "no_worker",
    }  # fmt: skip
    assert fake.asked == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", f"/v1/models/{MODEL}"])
async def test_without_redis_it_is_a_503_that_names_no_hosts(http, fake, path):
    fake.down = DOWN
    if path == CHAT:
        response = await http.post(path, json=chat())
    elif path == COMPLETIONS:
        response = await http.post(path, json=completion())
    else:
        response = await http.get(path)
    assert response.status == 503
    assert response.headers["Retry-After"] == "2"
    found = await error(response)
    assert (found["type"], found["code"]) == ("service_unavailable", "unavailable")
    assert "10.0.0.7" not in found["message"]
    assert fake.asked == []


async def test_mistakes_are_told_even_without_redis(http, fake):
    fake.down = DOWN
    assert (await http.post(CHAT, json=chat(n=2))).status == 400
    assert (await http.post(CHAT, json=chat(model="x"))).status == 404


async def test_a_redis_that_swallows_packets_costs_a_bounded_wait(http, fake, monkeypatch):
    monkeypatch.setattr(pool, "WAIT_SECONDS", 0.2)
    never = asyncio.Event()

    async def silent():
        fake.looks += 1
        await never.wait()

    fake.workers = silent
    start = time.monotonic()
    responses = await asyncio.gather(*(http.post(CHAT, json=chat()) for _ in range(5)))
    assert [r.status for r in responses] == [503] * 5
    # later ones do not wait at all: the same question is still unanswered
    assert (await http.post(CHAT, json=chat())).status == 503
    assert time.monotonic() - start < 1.5
    assert fake.looks == 1


async def test_a_full_queue_is_a_429(http, fake):
    fake.refuse = QueueFull("1024 requests are waiting, the limit is 1024", retry_after=1.0)
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status == 429
    assert response.headers["Retry-After"] == "1"
    assert await error(response) == {
        "message": "1024 requests are waiting, the limit is 1024",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


async def test_an_idempotency_key_of_another_request_is_a_409(http, fake):
    fake.refuse = IdConflict("id 'abc' belongs to a different request", param="id")
    response = await http.post(CHAT, json=chat(), headers={"Idempotency-Key": "k"})
    assert response.status == 409
    assert response.headers["x-should-retry"] == "false"
    found = await error(response)
    assert (found["code"], found["param"]) == ("conflict", "Idempotency-Key")


async def test_workers_are_looked_up_once_a_second_however_many_ask(fake):
    now = 100.0
    view = pool.PoolView(fake, clock=lambda: now)
    for _ in range(3):
        await asyncio.gather(*(view.serving(MODEL) for _ in range(50)))
    assert fake.looks == 1
    now = 100.99
    await view.serving(MODEL)
    assert fake.looks == 1
    now = 101.0
    await asyncio.gather(*(view.serving(MODEL) for _ in range(50)))
    assert fake.looks == 2


async def test_a_worker_that_came_after_the_last_look_is_found_before_a_request_is_refused(http, fake):
    fake.workers_now = [worker("prefill")]
    assert (await http.post(CHAT, json=chat())).status == 503
    fake.workers_now = both()
    assert (await http.post(CHAT, json=chat())).status == 200
    assert fake.looks == 2


async def test_a_request_is_not_refused_for_a_look_that_began_before_it_came(fake):
    """Nor for one that is still under way, and brings what was true before."""
    gate = asyncio.Event()

    async def slow():
        fake.looks += 1
        found = list(fake.workers_now)
        await gate.wait()
        return found

    fake.workers, fake.workers_now = slow, []
    view = pool.PoolView(fake)
    before = asyncio.create_task(view.look(MODEL))
    while fake.looks == 0:
        await asyncio.sleep(0)
    fake.workers_now = both()
    after = [asyncio.create_task(view.serving(MODEL)) for _ in range(10)]
    await asyncio.sleep(0)
    gate.set()
    assert (await before).missing == ["prefill", "decode"]
    assert [found.missing for found in await asyncio.gather(*after)] == [[]] * 10
    assert fake.looks == 2


async def test_however_many_requests_are_refused_redis_is_asked_ten_times_a_second_at_most(fake):
    fake.workers_now = []
    view = pool.PoolView(fake)
    began = time.monotonic()
    for _ in range(5):
        refused = await asyncio.gather(*(view.serving(MODEL) for _ in range(50)), return_exceptions=True)
        assert {type(error) for error in refused} == {NoWorker}
    assert 5 <= fake.looks <= 6  # the first look began before all but one of its wave had come
    assert time.monotonic() - began >= (fake.looks - 1) * pool.AGAIN_SECONDS


async def test_a_client_that_leaves_does_not_take_the_lookup_of_others_along(fake):
    gate = asyncio.Event()

    async def slow():
        await gate.wait()
        return both()

    fake.workers = slow
    view = pool.PoolView(fake)
    leaver, stayer = asyncio.create_task(view.look(MODEL)), asyncio.create_task(view.look(MODEL))
    await asyncio.sleep(0)
    leaver.cancel()
    await asyncio.wait({leaver})
    gate.set()
    assert (await stayer).missing == []


async def test_workers_with_a_smaller_context_set_the_limit(http, fake):
    fake.workers_now = [worker("prefill", context=100), worker("decode")]
    response = await http.post(COMPLETIONS, json=completion("a" * 100))
    assert response.status == 400
    assert "context is 100 tokens" in (await error(response))["message"]
    models = await (await http.get("/v1/models")).json()
    assert models["data"][0]["max_model_len"] == 100


async def test_health_is_200_whatever_happens(http, fake):
    fake.down, fake.workers_now = DOWN, []
    response = await http.get("/health")
    assert response.status == 200
    assert await response.json() == {"status": "ok"}


async def test_ready_is_200_with_both_stages(http, fake):
    fake.workers_now = [*both(), worker("decode")]
    response = await http.get("/ready")
    assert response.status == 200
    assert await response.json() == {"status": "ready", "prefill": 1, "decode": 2, "numerics": ["fused avx2"]}


async def test_ready_names_every_numerics_id_of_its_workers(http, fake):
    other = replace(worker("decode"), numerics="stock avx512")
    fake.workers_now = [*both(), other, replace(other, model="b", numerics="another model's")]
    assert (await (await http.get("/ready")).json())["numerics"] == ["fused avx2", "stock avx512"]


@pytest.mark.parametrize(
    ("down", "workers", "missing", "counts"),
    [
        (DOWN, both(), ["redis"], (0, 0)),
        (None, [], ["prefill", "decode"], (0, 0)),
        (None, [worker("prefill")], ["decode"], (1, 0)),
        (None, [worker("prefill", model="b"), worker("decode")], ["prefill"], (0, 1)),
    ],
)
async def test_ready_says_what_is_missing(http, fake, down, workers, missing, counts):
    fake.down, fake.workers_now = down, workers
    response = await http.get("/ready")
    assert response.status == 503
    assert response.headers["Retry-After"] == "2"
    body = await response.json()
    assert body == {
        "status": "unready",
        "missing": missing,
        "prefill": counts[0],
        "decode": counts[1],
        "error": {
            "message": f"Not ready: {' and '.join(missing)}.",
            "type": "service_unavailable",
            "param": None,
            "code": "not_ready",
        },
    }


async def test_models_lists_the_model_with_its_context(http, fake):
    fake.workers_now = [worker("decode")]
    body = await (await http.get("/v1/models")).json()
    (model,) = body["data"]
    assert isinstance(model.pop("created"), int)
    assert model == {"id": MODEL, "object": "model", "owned_by": "pdq", "max_model_len": CONTEXT}
    assert body["object"] == "list"


@pytest.mark.parametrize("workers", [[], [worker("decode", model="b")]])
async def test_models_is_empty_without_a_live_worker(http, fake, workers):
    fake.workers_now = workers
    response = await http.get("/v1/models")
    assert response.status == 200
    assert await response.json() == {"object": "list", "data": []}
    assert (await http.get(f"/v1/models/{MODEL}")).status == 503


@pytest.mark.parametrize("spelled", [MODEL, MODEL.replace("/", "%2F")])
async def test_a_model_is_found_by_an_id_with_a_slash(http, spelled):
    response = await http.get(f"/v1/models/{spelled}")
    assert response.status == 200
    body = await response.json()
    assert (body["id"], body["max_model_len"]) == (MODEL, CONTEXT)


@pytest.mark.parametrize("name", ["gpt-4", "org", "org/test-model/x", "%ff", "%00", "%ED%A0%80"])
async def test_an_unknown_model_id_is_a_404(http, name):
    response = await http.get(f"/v1/models/{name}")
    assert response.status == 404
    found = await error(response)
    assert (found["code"], found["param"]) == ("model_not_found", "model")

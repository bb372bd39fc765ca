"""Whether a worker may join a pool."""

import pytest
from fakeredis import FakeAsyncRedis

from pdq import heartbeats
from pdq.errors import ConfigError
from pdq.keys import Keys
from pdq.messages import WorkerInfo, encode

KEYS = Keys("pool")


async def pool_with(fingerprint: bytes) -> FakeAsyncRedis:
    redis = FakeAsyncRedis()
    await redis.zadd(KEYS.workers, {"other": 1})
    await redis.set(KEYS.worker("other"), encode(WorkerInfo("other", "decode", "tiny", fingerprint, 100)))
    return redis


async def test_a_worker_joins_those_that_have_its_kv() -> None:
    await heartbeats.join(await pool_with(b"a" * 32), KEYS, b"a" * 32)


async def test_a_worker_with_other_kv_is_refused_and_told_what_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "TTL_MS", 0)
    monkeypatch.setattr(heartbeats, "LOOK_SECONDS", 0)
    redis = await pool_with(b"a" * 32)
    wanted = r"decode worker other with tiny and KV fingerprint 61616161.* this worker's is 62626262.*--quantization"
    with pytest.raises(ConfigError, match=wanted):
        await heartbeats.join(redis, KEYS, b"b" * 32)

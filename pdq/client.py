"""The SDK: submit requests to a pool and read their answers, over Redis alone.

`AsyncClient` for asyncio, `Client` for everything else (it runs an `AsyncClient` on a thread of its own). Needs redis
and msgpack only; text is tokenized by the worker. The gateway is built on the same client.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from redis.exceptions import MovedError

from pdq import connection, heartbeats, scripts
from pdq.config import RedisSettings
from pdq.connection import RedisError
from pdq.end_events import CANCELLED, EXPIRED, WAITED
from pdq.errors import (
    ConfigError,
    DeadlineExceeded,
    IdConflict,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    RequestNotFound,
    Unavailable,
    from_wire,
)
from pdq.keys import CANCELS, GROUP, Keys
from pdq.messages import (
    LANES,
    VERSION,
    BadMessage,
    Event,
    Message,
    Request,
    Timings,
    TokenLogprob,
    Usage,
    WorkerInfo,
    encode,
)
from pdq.replies import ReplyHub
from pdq.validate import make_request

log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0  # a silent request is looked up this often: it may have been lost, or nobody may be there to end it
OVERDUE_GRACE_MS = 3_000  # workers end a request at its deadline; a reader does it this much later
ENDED_TTL_MS = 60_000


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. finish_reason: "stop" or "length". logprobs: one a token, if they were asked for."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """Where a request is. stage: "prefill", "decode", "done"; state: "queued", "running", "done"."""

    stage: str
    state: str
    attempt: int
    tokens: int
    reason: str | None


class Handle:
    """A submitted request. Handles hold no resources; one can be made again from the id by `AsyncClient.attach`."""

    def __init__(self, client: AsyncClient, request_id: str, *, timeout: float | None = None) -> None:
        self.id = request_id
        self._client = client
        self._submitted = timeout is not None  # here and now, so that its absence is a loss
        self._deadline = time.monotonic() + (timeout or 0.0)

    async def stream(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The events after the first `after` tokens, in order, the terminal one last.

        Raises what ended the request if that was an error (RequestFailed, RequestCancelled, DeadlineExceeded,
        InvalidRequest, ...), RequestNotFound if it does not exist (any more), Unavailable if Redis stays away or lost
        the request or a part of the reply.
        """
        hub = self._client.hub
        sub = await hub.subscribe(self.id, after)
        position: int | None = None
        try:
            while True:
                event = await sub.get(CHECK_SECONDS)
                if event is None:
                    await self._check(sub.last_id)
                    continue
                if event.error is not None:
                    raise from_wire(event.error)
                # The first event may begin before `after`. Else only a Redis that forgets makes a gap or a repetition:
                # a stream was deleted, or a failover undid writes.
                if event.index > after if position is None else event.index != position:
                    raise Unavailable("Redis lost a part of the reply", retry_after=1.0)
                position = event.index + len(event.token_ids)
                yield event
                if event.terminal:
                    return
        finally:
            sub.close()

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole answer. Raises as `stream`, and TimeoutError after `timeout` seconds (it runs on)."""
        async with asyncio.timeout(timeout):
            text: list[str] = []
            tokens: list[int] = []
            logprobs: list[TokenLogprob] = []
            async for event in self.stream():
                text.append(event.text)
                tokens += event.token_ids
                logprobs += event.logprobs
        if event.finish_reason is None or event.usage is None:
            raise RequestFailed("the reply ended without a result")
        return Result(
            id=self.id, text="".join(text), token_ids=tuple(tokens), finish_reason=event.finish_reason,
            usage=event.usage, timings=event.timings or Timings(), logprobs=tuple(logprobs),
        )  # fmt: skip

    async def cancel(self) -> bool:
        """End the request; True if a cancel has ended it or will, False if it had ended by itself before.

        May be called again. Raises RequestNotFound, Unavailable.
        """
        return await self._client.cancel(self.id)

    async def status(self) -> Status:
        """Raises RequestNotFound, Unavailable."""
        return await self._client.status(self.id)

    async def _check(self, last_id: str) -> None:
        """Nothing came for a while: make sure that something still can. Raises what ended the request for good."""
        try:
            if self._client.hub.away:
                raise Unavailable("Redis does not answer")  # nor need every reader ask it
            async with asyncio.timeout(CHECK_SECONDS):  # what the stream brings meanwhile must not wait for longer
                status = await self._client.check(self.id)
                gone = status.state == "done" and not await self._client.has_events(self.id, last_id)
        except (Unavailable, TimeoutError) as e:
            if self._submitted and time.monotonic() > self._deadline + OVERDUE_GRACE_MS / 1000:
                raise DeadlineExceeded("the request's deadline has passed and Redis does not answer") from e
            return  # the reader of the replies counts how long Redis is away
        except RequestNotFound as e:
            if self._submitted:
                raise Unavailable("Redis lost the request", retry_after=1.0) from e
            raise
        if gone:
            raise Unavailable("Redis lost the reply", retry_after=1.0)


class AsyncClient:
    """Submits to one pool. Use as an async context manager, or call `aclose`.

    Submits are refused with QueueFull while `max_queued` requests wait for or are in prefill, or if their prompt tokens
    (estimated for text) would exceed `max_queued_tokens`.
    """

    def __init__(
        self,
        settings: RedisSettings | None = None,
        *,
        max_queued: int | None = None,
        max_queued_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self.settings = settings or RedisSettings.load(**options)
        self.keys = Keys(self.settings.pool)
        self.max_queued = max_queued or 0
        self.max_queued_tokens = max_queued_tokens or 0
        self._redis = connection.command(self.settings.redis_url, home=self.keys.home)
        self._waiting = connection.blocking(self.settings.redis_url, self.keys.home)
        self.hub = ReplyHub(self._redis, self._waiting, self.keys)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.hub.aclose()
        await self._redis.aclose()
        await self._waiting.aclose()

    async def submit(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        lane: str = "normal",
        timeout: float = 600.0,
        queue_timeout: float = 0.0,
        id: str | None = None,  # noqa: A002  the public name of the thing
        idempotency_key: str | None = None,
        tenant: str = "",
        cache: str = "on",
        cache_salt: str = "",
        speculation: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """Queue a request: exactly one of `prompt`, `messages`, `token_ids`, and SamplingParams' fields as keywords.

        lane: "high", "normal" or "batch". timeout: seconds to the last token. queue_timeout: seconds until a worker
        takes it, 0 for no limit. id: chosen by the caller; submitting the same request with the same id (or idempotency
        key) again gives the first one, and runs it again if Redis has evicted its answer. No seed means one made from
        the id, which is random if it is not chosen. speculation: "ngram" or "off": may decode guess tokens that repeat
        the text, and check several at once? It changes no token; None: as the workers are set.

        tenant: whose request this is; prefixes and idempotency keys are shared within a tenant only. It is taken on
        trust, since who has the pool's Redis can read everything: the gateway takes it from the API key. cache_salt:
        shares prefixes only with the tenant's requests of the same salt. cache: "off" uses and leaves no prefix at all.

        Raises InvalidRequest (`param` names the field), IdConflict, QueueFull, Unavailable.
        """
        if idempotency_key is not None:
            if id is not None:
                raise InvalidRequest("idempotency_key: not together with id", param="idempotency_key")
            name = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        else:
            name = uuid.uuid4().hex if id is None else id
        request = make_request(
            id=name, prompt=prompt, messages=messages, token_ids=token_ids,
            model=model, lane=lane, timeout=timeout, queue_timeout=queue_timeout, tenant=tenant,
            cache=cache, cache_salt=cache_salt, speculation=speculation, sampling=sampling,
        )  # fmt: skip
        await self._submit(request, fresh_seed=sampling.get("seed") is None)
        return Handle(self, request.id, timeout=timeout)

    async def _submit(self, request: Request, *, fresh_seed: bool) -> None:
        try:
            data = encode(request)
        except BadMessage as e:  # too large to be queued
            raise InvalidRequest(str(e), param=_prompt_field(request)) from e
        # A seed drawn here differs between two submits of one request; it is no part of what makes them the same.
        same = encode(_unseeded(request)) if fresh_seed else data
        lanes = [self.keys.prefill(lane) for lane in LANES]
        call = scripts.submit(
            [*self._of(request.id), self.keys.prefill(request.lane), *lanes],
            *(VERSION, request.id, data, hashlib.sha256(same).digest(), request.lane),
            *(_ms(request.timeout), _ms(request.queue_timeout)),
            *(request.cost, self.max_queued, self.max_queued_tokens),
        )
        try:
            verdict, depth, tokens = await call.run(self._redis)
        except RedisError as e:
            raise _unavailable(e) from e
        if verdict == b"conflict":
            raise IdConflict(f"id {request.id!r} belongs to a different request", param="id")
        if verdict == b"full":
            raise QueueFull(f"{depth} requests with {tokens} prompt tokens are waiting for prefill", retry_after=1.0)

    def attach(self, request_id: str) -> Handle:
        """A handle for a request submitted earlier, here or elsewhere."""
        return Handle(self, request_id)

    async def cancel(self, request_id: str) -> bool:
        keys = self.keys
        call = scripts.cancel(
            [*self._of(request_id), keys.cancels, *map(keys.prefill, LANES), keys.decode],
            *(GROUP, request_id, CANCELLED, ENDED_TTL_MS, CANCELS, *LANES),
        )
        try:
            verdict = await call.run(self._redis)
        except RedisError as e:
            raise _unavailable(e) from e
        if verdict == b"unknown":
            raise RequestNotFound(f"there is no request {request_id!r}")
        return bool(verdict != b"done")

    async def status(self, request_id: str) -> Status:
        try:
            found: list[Any] = await self._redis.hmget(
                self.keys.request(request_id), ["stage", "state", "attempt", "pos", "reason"]
            )
        except RedisError as e:
            raise _unavailable(e) from e
        stage, state, attempt, pos, reason = found
        if stage is None:
            raise RequestNotFound(f"there is no request {request_id!r}; results are kept for a limited time")
        return Status(
            stage.decode(), state.decode(), int(attempt), int(pos), None if reason is None else reason.decode()
        )

    async def check(self, request_id: str) -> Status:
        """As `status`, and see to it that the request can still end: see lua/check."""
        keys = self.keys
        call = scripts.check(
            [*self._of(request_id), *map(keys.prefill, LANES), keys.decode],
            *(GROUP, request_id, ENDED_TTL_MS, OVERDUE_GRACE_MS, EXPIRED, WAITED, *LANES),
        )
        try:
            found = await call.run(self._redis)
        except RedisError as e:
            raise _unavailable(e) from e
        if not found:
            raise RequestNotFound(f"there is no request {request_id!r}; results are kept for a limited time")
        stage, state, attempt, pos, reason, done = found
        if done:
            log.warning("%s: %s by its reader", request_id, done.decode())
        return Status(stage.decode(), state.decode(), int(attempt), int(pos), reason.decode() or None)

    def _of(self, request_id: str) -> list[str]:
        return [self.keys.request(request_id), self.keys.out(request_id), self.keys.load]

    async def has_events(self, request_id: str, after: str) -> bool:
        """Are there events after entry id `after`? Raises Unavailable."""
        try:
            return bool(await self._redis.xrange(self.keys.out(request_id), min=f"({after}", count=1))
        except RedisError as e:
            raise _unavailable(e) from e

    async def workers(self) -> list[WorkerInfo]:
        """The workers whose heartbeat is fresh. Raises Unavailable."""
        try:
            return await heartbeats.live(self._redis, self.keys)
        except RedisError as e:
            raise _unavailable(e) from e

    async def ping(self) -> None:
        """Raises Unavailable when Redis does not answer."""
        try:
            await self._redis.ping()
        except RedisError as e:
            raise _unavailable(e) from e


def _unseeded(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, seed=0))


def _prompt_field(request: Request) -> str:
    return next(name for name in ("token_ids", "messages", "prompt") if getattr(request, name) is not None)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _unavailable(error: RedisError) -> Unavailable | ConfigError:
    if isinstance(error, MovedError):
        return ConfigError(f"redis_url: {connection.IS_CLUSTER}")
    return Unavailable(f"Redis does not answer: {error}", retry_after=2.0)

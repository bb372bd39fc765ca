"""One request over HTTP: from its prompt to its record. aiohttp lives here.

Every way in which a server can fail becomes a record with the kind of error; nothing a server does ends the run:

    connect              no connection             no_done, no_finish_reason   the stream ended too early, in order
    http_<status>        any status but 200        no_content                  it was whole, but without text
    timeout              longer than --timeout     error_event, finish_error   the server says it failed
    closed               broken off                bad_event, not_a_stream     not what the API promises
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson

from pdq.bench.records import Record, clock
from pdq.bench.settings import CHAT, BenchSettings
from pdq.bench.stream import Answer, Fault, Lines, error_text
from pdq.errors import Unavailable

_CONNECT_SECONDS = 10.0
_LIST_SECONDS = 30.0
# Servers close idle connections after 5 s or more; a request on one that is just closing would count as an error.
_KEEP_ALIVE_SECONDS = 4.0
_END_SECONDS = 0.1
_LONGEST_ERROR = 65536

Message = dict[str, str]


@asynccontextmanager
async def connect(settings: BenchSettings) -> AsyncIterator[Client]:
    """A client of the server, which must be there. Raises Unavailable if it is not, or lists no model to use."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        yield Client(session, settings, await _model(session, settings))


class Client:
    """Sends requests. `left_out`: optional fields that the server was found not to take."""

    def __init__(self, session: aiohttp.ClientSession, settings: BenchSettings, model: str) -> None:
        self._session = session
        self._settings = settings
        self.model = model
        self.left_out: set[str] = set()
        path = "/v1/chat/completions" if settings.endpoint == CHAT else "/v1/completions"
        self._url = settings.base_url + path

    async def ask(
        self, messages: Sequence[Message], output_tokens: int, series: str, turn: int = 0
    ) -> tuple[Record, str]:
        """The record of a request, and the text of its answer. A completion gets the last message as its prompt.

        A refusal of an optional field is not counted: the request is sent again without it, and all later ones.
        """
        while True:
            body = self._body(messages, output_tokens)
            answer, start = Answer(), clock()
            fault = await self._outcome(body, answer)
            if fault is None or not fault.refused:
                return _record(series, turn, start, answer, fault), "".join(answer.texts)
            self.left_out.add(fault.refused)

    def _body(self, messages: Sequence[Message], output_tokens: int) -> dict[str, Any]:
        chat = self._settings.endpoint == CHAT
        body = {
            "model": self.model,
            **({"messages": list(messages)} if chat else {"prompt": messages[-1]["content"]}),
            "max_tokens": output_tokens,
            "temperature": self._settings.temperature,
            "stream": True,
        }
        optional: dict[str, Any] = {"stream_options": {"include_usage": True}}
        if self._settings.ignore_eos:
            optional["ignore_eos"] = True
        return body | {name: value for name, value in optional.items() if name not in self.left_out}

    async def _outcome(self, body: dict[str, Any], answer: Answer) -> Fault | None:
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._read(body, answer)
                answer.check()
        except Fault as e:
            return e
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            return Fault("connect", _why(e))
        except TimeoutError:
            return Fault("timeout", f"not done after {self._settings.timeout:g} s")
        except (aiohttp.ClientError, OSError) as e:
            return Fault("closed", _why(e))
        return None

    async def _read(self, body: dict[str, Any], answer: Answer) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=orjson.dumps(body), headers=headers) as response:
            if response.status != 200:
                raise await _refusal(response, body)
            if response.content_type != "text/event-stream":
                raise Fault("not_a_stream", f"the answer is {response.content_type}")
            lines = Lines()
            async for piece in response.content.iter_any():
                _take(lines.feed(piece), answer)
                if answer.done:
                    return await _end(response)
            return _take(lines.close(), answer)


def _take(events: Sequence[bytes], answer: Answer) -> None:
    now = clock()
    for event in events:
        answer.take(event, now)


async def _end(response: aiohttp.ClientResponse) -> None:
    """Read what follows [DONE], so that the connection can be used again; whatever it is, the answer is whole."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await response.content.read()


async def _refusal(response: aiohttp.ClientResponse, body: dict[str, Any]) -> Fault:
    text = (await response.content.read(_LONGEST_ERROR)).decode("utf-8", "replace")
    with suppress(orjson.JSONDecodeError):
        text = error_text(orjson.loads(text))
    optional = ("ignore_eos", "stream_options") if response.status in (400, 422) else ()
    refused = next((name for name in optional if name in body and name in text), "")
    return Fault(f"http_{response.status}", text, refused=refused)


def _record(series: str, turn: int, start: float, answer: Answer, fault: Fault | None) -> Record:
    return Record(
        series=series,
        turn=turn,
        start=start,
        end=clock() if answer.ended is None else answer.ended,
        chunks=tuple(answer.chunks),
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        finish_reason=answer.finish_reason,
        error=fault.kind if fault else "",
        detail=fault.message if fault else "",
    )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


async def _model(session: aiohttp.ClientSession, settings: BenchSettings) -> str:
    """The name to ask for. Looks at the server in any case, so that one that is not there is found out at once."""
    try:
        async with asyncio.timeout(min(settings.timeout, _LIST_SECONDS)):
            async with session.get(settings.base_url + "/v1/models") as response:
                status, text = response.status, (await response.read()).decode("utf-8", "replace")
    except (aiohttp.ClientError, OSError, TimeoutError) as e:
        raise Unavailable(f"no server answers at {settings.url} ({_why(e)})") from e
    if settings.model:
        return settings.model
    try:
        found = orjson.loads(text)
        return str(found["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as e:
        said = f" ({status}: {error_text(text)[:200]})" if status != 200 else ""
        raise Unavailable(f"{settings.url} lists no model; name one with --model{said}") from e

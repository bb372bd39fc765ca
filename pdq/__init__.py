"""pdq: prefill/decode-separated LLM inference over Redis.

    from pdq import Client

    with Client(redis_url="redis://127.0.0.1:6379/0") as client:
        print(client.submit(prompt="Once upon a time", max_tokens=32).result().text)

The light install (redis, msgpack) is this client; the gateway and the workers come with the extras.
"""

from pdq.client import AsyncClient, Handle, Result, Status
from pdq.config import RedisSettings
from pdq.errors import (
    ContextTooLong,
    DeadlineExceeded,
    IdConflict,
    InvalidRequest,
    ModelNotFound,
    PdqError,
    QueueFull,
    RequestCancelled,
    RequestFailed,
    RequestNotFound,
    Unavailable,
)
from pdq.messages import Event, Message, SamplingParams, Timings, TokenLogprob, TopLogprob, Usage, WorkerInfo
from pdq.sync_client import Client, SyncHandle

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "ContextTooLong",
    "DeadlineExceeded",
    "Event",
    "Handle",
    "IdConflict",
    "InvalidRequest",
    "Message",
    "ModelNotFound",
    "PdqError",
    "QueueFull",
    "RedisSettings",
    "RequestCancelled",
    "RequestFailed",
    "RequestNotFound",
    "Result",
    "SamplingParams",
    "Status",
    "SyncHandle",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "Unavailable",
    "Usage",
    "WorkerInfo",
    "__version__",
]

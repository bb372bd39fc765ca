"""The terminal events of requests that end with an error, and those whose text never differs, ready for Redis.

Scripts write them where no worker has the request. Knows nothing of queues or Redis.
"""

from __future__ import annotations

from pdq.errors import DeadlineExceeded, PdqError, RequestCancelled
from pdq.messages import Event, encode


def end_event(error: PdqError, index: int = 0) -> Event:
    """The terminal event that tells a client of `error`."""
    reason = "cancelled" if isinstance(error, RequestCancelled) else "error"
    return Event(index, finish_reason=reason, error=error.wire())


CANCELLED = encode(end_event(RequestCancelled("the request was cancelled")))
EXPIRED = encode(end_event(DeadlineExceeded("the request's deadline has passed")))
WAITED = encode(end_event(DeadlineExceeded("no worker took the request within its queue timeout")))

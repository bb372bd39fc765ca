"""Every error pdq raises on purpose, its HTTP status and whether trying again can help.

    PdqError
    ├── InvalidRequest          400  the request itself is wrong; `param` names the field
    │   └── ContextTooLong      400  prompt or prompt + max_tokens over the model's context
    ├── ModelNotFound           404
    ├── RequestNotFound         404  no request with this id (never was, or its result has expired)
    ├── IdConflict              409  the id or idempotency key belongs to a different request
    ├── RequestCancelled        499
    ├── RequestFailed           500  a worker could not do it (after all attempts)
    ├── QueueFull               429  retryable
    ├── Unavailable             503  retryable: no Redis, no worker, model loading
    ├── DeadlineExceeded        504
    ├── LostLease                    a worker's write was refused: the job is somebody else's now
    ├── ConfigError                  a setting is wrong; raised at start
    └── ModelUnsupported             the model cannot run in a prefill/decode pipeline; raised at start

`wire()` and `from_wire()` carry an error through a reply stream without losing its class.
"""

from __future__ import annotations

from typing import ClassVar

from pdq.messages import ErrorInfo


class PdqError(Exception):
    """Base of the tree. `status`: HTTP status; `code`: stable machine-readable name; `retryable`: may a retry help."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def wire(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, message=self.message, param=self.param)


class InvalidRequest(PdqError):
    status, code = 400, "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(PdqError):
    status, code = 404, "model_not_found"


class RequestNotFound(PdqError):
    status, code = 404, "request_not_found"


class IdConflict(PdqError):
    status, code = 409, "conflict"


class RequestCancelled(PdqError):
    status, code = 499, "cancelled"


class RequestFailed(PdqError):
    code = "request_failed"


class QueueFull(PdqError):
    status, code, retryable = 429, "queue_full", True


class Unavailable(PdqError):
    status, code, retryable = 503, "unavailable", True


class DeadlineExceeded(PdqError):
    status, code = 504, "deadline_exceeded"


class LostLease(PdqError):
    code = "lost_lease"


class ConfigError(PdqError):
    code = "config"


class ModelUnsupported(PdqError):
    code = "model_unsupported"


_BY_CODE: dict[str, type[PdqError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, ContextTooLong, ModelNotFound, RequestNotFound, IdConflict,
        RequestCancelled, RequestFailed, QueueFull, Unavailable, DeadlineExceeded,
    )
}  # fmt: skip


def from_wire(info: ErrorInfo) -> PdqError:
    """The exception that `info` stands for; an unknown code becomes `RequestFailed`."""
    return _BY_CODE.get(info.code, RequestFailed)(info.message, param=info.param)

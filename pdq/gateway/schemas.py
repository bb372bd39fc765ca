"""What the bodies of POST /v1/chat/completions and /v1/completions may hold. Strict: no "1" for 1, no true for 1.

Ranges are those of `pdq.validate`, which checks again for callers that do not come through HTTP. Pydantic's findings
leave here as one InvalidRequest with one sentence and the dotted name of the field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from pdq.errors import ContextTooLong, InvalidRequest
from pdq.gateway import unsupported
from pdq.messages import Message
from pdq.validate import MAX_LISTED, MAX_LOGPROBS, MAX_SALT_CHARS, MAX_SEED, MAX_STOP_CHARS, MAX_STOPS

B = TypeVar("B", bound="GenerationBody")
MAX_PROMPTS = 128
MAX_INT32 = 2**31 - 1


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("stop_type", "must be a string or an array of strings")


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None, BeforeValidator(_stop_list)
]


def _bias_object(value: Any) -> Any:
    """What a JSON object cannot say by its types: keys are token ids, each in one spelling."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object that maps token ids to numbers")
    if len(value) > MAX_LISTED:  # before millions are looked at one by one
        raise PydanticCustomError("bias_size", "must have at most {most} items", {"most": MAX_LISTED})
    for key in value:
        if not _TOKEN_KEY.fullmatch(key) or int(key) > MAX_INT32:
            shown = key if len(key) <= 50 else key[:50] + "…"
            raise PydanticCustomError("bias_key", "has the key {key}, which is no token id", {"key": repr(shown)})
    return value


def _no_false(value: Any) -> Any:
    return None if value is False else value


_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Biases = Annotated[dict[str, Bias] | None, BeforeValidator(_bias_object)]
Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_LISTED, fail_fast=True)]
Logprobs = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Strict):
    include_usage: bool | None = None


class GenerationBody(Strict):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_INT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=MAX_SEED)] = None
    stop: Stops = None
    ignore_eos: bool | None = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10, allow_inf_nan=False)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Biases = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_INT32)] = None
    allowed_token_ids: Annotated[TokenIds | None, Field(min_length=1)] = None
    stop_token_ids: TokenIds | None = None
    cache: Literal["on", "off"] | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT_CHARS)] = None
    speculation: Literal["ngram", "off"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        """The limit on the completion, and the field it stands in."""
        return "max_tokens", self.max_tokens

    @property
    def needed_tokens(self) -> tuple[str, int | None]:
        """As `wanted_tokens`; without a limit, the least that was asked for. Room for as many is needed."""
        name, wanted = self.wanted_tokens
        return (name, wanted) if wanted is not None else ("min_tokens", self.min_tokens or None)

    @property
    def scored(self) -> int | None:
        """None, or of how many most likely tokens the log probabilities are wanted beside the chosen one's."""
        return None

    def handling(self) -> dict[str, str]:
        """As `sampling`. cache_salt is not the whole salt: it comes on top of the tenant's."""
        given = {"cache": self.cache, "cache_salt": self.cache_salt, "speculation": self.speculation}
        return {name: value for name, value in given.items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """Keywords for `AsyncClient.submit`, max_tokens aside; what was not given is left out."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens,
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": self.scored,
        }
        return {name: value for name, value in given.items() if value is not None}


class Part(Strict):
    """One piece of a message's content."""

    type: str
    text: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value != "text":
            shown = value if len(value) <= 50 else value[:50] + "…"
            raise PydanticCustomError(
                "part", "is {kind}, but only parts of type 'text' are supported", {"kind": repr(shown)}
            )
        return value


def _parts(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or an array of content parts")


class ChatMessage(Strict):
    """One turn; its content as parts, whatever form it came in."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[list[Part], Field(fail_fast=True)], BeforeValidator(_parts)]
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @field_validator("tool_calls", "function_call", "audio")
    @classmethod
    def _absent(cls, value: Any) -> Any:
        if value is not None and value != []:
            raise PydanticCustomError("not_text", "is not supported by this server")
        return value

    def message(self) -> Message:
        return Message(self.role, "".join(p.text for p in self.content), self.name)


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Logprobs = None

    @property
    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @classmethod
    def parse(cls, value: Any, limit: int) -> Self:
        """limit: the context in tokens; more turns than that cannot fit, and are not looked at one by one.

        Raises InvalidRequest, ContextTooLong.
        """
        turns = value.get("messages") if isinstance(value, dict) else None
        if isinstance(turns, list) and len(turns) >= limit:
            text = f"This model's context is {limit} tokens, but messages has at least {len(turns)} tokens."
            raise ContextTooLong(text, param="messages")
        body = _parse(cls, value, unsupported.CHAT)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs is only allowed together with logprobs.", param="top_logprobs")
        return body

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "(text)"
    if not isinstance(value, list):
        return None
    if value and isinstance(value[0], list):
        return "(id lists)"
    return "(texts)" if not value or isinstance(value[0], str) else "(ids)"


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
# The tags are in parentheses so that they can be told from field names in a finding's location.
Prompt = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[Texts, Tag("(texts)")]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[IdLists, Tag("(id lists)")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, an array of strings, an array of token ids or an array of such arrays",
    ),
]


class CompletionBody(GenerationBody):
    prompt: Prompt
    logprobs: Annotated[Logprobs, BeforeValidator(_no_false)] = None

    @property
    def scored(self) -> int | None:
        return self.logprobs

    @classmethod
    def parse(cls, value: Any, limit: int) -> Self:
        """limit: as in ChatBody; long prompts are cheap to check. Raises InvalidRequest."""
        del limit
        return _parse(cls, value, unsupported.COMPLETION)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt of the request, also when it is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


def _parse(schema: type[B], value: Any, refused: Any) -> B:
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {_json_kind(value)}.")
    unsupported.refuse_unsupported(value, refused)
    try:
        body = schema.model_validate(value)
    except ValidationError as e:
        raise _invalid(e.errors(include_url=False)[0]) from None
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed together with stream.", param="stream_options")
    name, wanted = body.wanted_tokens
    if wanted is not None and (body.min_tokens or 0) > wanted:
        raise InvalidRequest(f"min_tokens must be at most {name}, which is {wanted}.", param="min_tokens")
    return body


_SENTENCES = {
    "missing": "is required",
    "string_type": "must be a string, got {kind}",
    "int_type": "must be an integer, got {kind}",
    "float_type": "must be a number, got {kind}",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false, got {kind}",
    "list_type": "must be an array, got {kind}",
    "dict_type": "must be an object, got {kind}",
    "model_type": "must be an object, got {kind}",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters",
}


def _invalid(finding: ErrorDetails) -> InvalidRequest:
    param = ".".join(str(p) for p in finding["loc"] if not str(p).startswith("("))
    sentence = _SENTENCES.get(finding["type"])
    if sentence is None:  # raised by a validator here, in these words
        sentence = finding["msg"]
    else:
        sentence = sentence.format(kind=_json_kind(finding["input"]), **finding.get("ctx", {}))
    return InvalidRequest(f"{param} {sentence}.", param=param)


def _json_kind(value: Any) -> str:
    kinds = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")

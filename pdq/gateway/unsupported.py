"""Request fields that mean something but cannot be honoured: they are refused by name, never dropped in silence.

Fields that are neither here nor in schemas.py change nothing about the answer (`user`, `metadata`, `store`, ...) or are
unknown, and are ignored. A listed field passes as null or with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdq.errors import InvalidRequest

_TOOLS = "tools are not supported by this server"
_CONSTRAINED = "constrained output is not supported by this server"
_ONE_ANSWER = "only one answer per request is supported"

# field: (values that ask for nothing, why others are refused)
COMMON: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE_ANSWER),
    "prompt_logprobs": ((), "log probabilities of the prompt are not supported by this server"),
    "stop_regex": ((), "it is not supported by this server"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the text"),
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
    "bad_words": (([],), _CONSTRAINED),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "grammar": (("",), _CONSTRAINED),
    "json_schema": ((), _CONSTRAINED),
    "regex": ((), _CONSTRAINED),
    "ebnf": ((), _CONSTRAINED),
    "return_token_ids": ((False,), "it is not supported by this server"),
    "truncate_prompt_tokens": ((), "prompts are never cut"),
    "use_beam_search": ((False,), "it is not supported by this server"),
    "logits_processors": (([],), "it is not supported by this server"),
}

CHAT = COMMON | {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "web_search_options": ((), "it is not supported by this server"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "the model's own template is used as it is"),
    "continue_final_message": ((False,), "it is not supported by this server"),
    "add_generation_prompt": ((True,), "it is not supported by this server"),
    "documents": (([],), "it is not supported by this server"),
}

COMPLETION = COMMON | {
    "best_of": ((1,), _ONE_ANSWER),
    "echo": ((False,), "it is not supported by this server"),
    "suffix": (("",), "it is not supported by this server"),
    "top_logprobs": ((0,), "logprobs says here how many are wanted"),
    "prompt_embeds": ((), "it is not supported by this server"),
    "add_special_tokens": ((True,), "it is not supported by this server"),
}


def refuse_unsupported(body: Mapping[str, Any], fields: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raises InvalidRequest for the first field of `body` that asks for something listed in `fields`."""
    for name, value in body.items():
        if name not in fields:
            continue
        harmless, why = fields[name]
        # 1 == True and 0 == False in Python, but not in a request
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise InvalidRequest(f"{name}: {why}.", param=name)

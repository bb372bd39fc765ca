"""pdq: prefill/decode-separated LLM inference over Redis."""

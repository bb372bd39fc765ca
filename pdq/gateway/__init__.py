"""The OpenAI-compatible HTTP front: aiohttp on one side, the SDK's `AsyncClient` on the other.

    app.py          routes and the application; `create_app` is the way in
    middleware.py   around every request: its label, the error shape, the log line, 503 while loading or draining
    auth.py         the API key of a request, and the tenant it stands for
    body.py         bytes to a checked body; schemas.py and unsupported.py say what a body may hold
    chat.py         POST /v1/chat/completions
    completions.py  POST /v1/completions
    prompts.py      text to tokens, and whether they fit the context
    jobs.py         the queued requests behind one HTTP request: submit, read, cancel when the client goes away
    replies.py      one answer as JSON or as a stream; sse.py owns the framing
    logprobs.py     log probabilities in OpenAI's two shapes
    status.py       GET /health, /ready, /v1/models
    pool.py         which workers live, looked up at most once a second
    offload.py      a few threads for the work that would hold up the event loop
    errors.py       the OpenAI error object
    server.py       the process: load the tokenizer, listen, drain on a signal

Everything a client can get wrong is answered before anything is queued. Nothing is kept between requests, so any
number of gateways may run. No torch, no transformers, no `pdq.engine` here.
"""

"""The aiohttp application: routes, middlewares and the objects they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from pdq.config import GatewaySettings
from pdq.gateway import auth, chat, completions, middleware, status
from pdq.gateway.context import GATEWAY, Gateway, Served
from pdq.text import Tokenizer

if TYPE_CHECKING:
    from pdq.client import AsyncClient

PING_SECONDS = 10.0


def create_app(
    settings: GatewaySettings,
    *,
    client: AsyncClient,
    tokenizer: Tokenizer,
    model_name: str,
    max_model_len: int,
    ping_seconds: float = PING_SECONDS,
) -> web.Application:
    """The gateway as an application. The caller closes `client` after the app's cleanup.

    max_model_len: prompt + completion, in tokens. ping_seconds: longest silence of a stream. Run it with
    `handler_cancellation=True`, or a client that goes away while nothing is being written is not noticed.
    """
    model = Served(model_name, tokenizer, max_model_len)
    return app_of(Gateway(settings, client, model, ping_seconds))


def app_of(gateway: Gateway) -> web.Application:
    """The application around `gateway`, whose model may come later."""
    app = web.Application(
        client_max_size=gateway.settings.max_body_bytes,
        middlewares=[middleware.around, auth.authenticate, middleware.gate],
    )
    app[GATEWAY] = gateway
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_get("/v1/models", status.list_models)
    app.router.add_get("/v1/models/{id:.+}", status.get_model)
    app.router.add_get("/health", status.health)
    app.router.add_get("/ready", status.ready)
    app.on_response_prepare.append(middleware.mark)
    app.cleanup_ctx.append(auth.watch_keys)
    app.on_cleanup.append(_cleanup)
    return app


async def _cleanup(app: web.Application) -> None:
    await app[GATEWAY].aclose()

"""`pdq serve`: an embedded Valkey, the gateway and the workers as children of one supervisor. No torch, no aiohttp."""

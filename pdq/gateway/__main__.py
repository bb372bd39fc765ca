"""`python -m pdq.gateway`: run the gateway as PDQ_* variables say. Exit code 2 for what a restart would not change."""

from __future__ import annotations

import logging
import os
import sys

from pdq.config import GatewaySettings
from pdq.errors import ConfigError, ModelNotFound, ModelUnsupported, PdqError
from pdq.gateway.server import run

log = logging.getLogger("pdq.gateway")


def main() -> int:
    level = os.environ.get("PDQ_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr)
    try:
        run(GatewaySettings.load())
    except (ConfigError, ModelNotFound, ModelUnsupported) as e:
        log.error("%s", e)
        return 2
    except (PdqError, OSError) as e:
        log.error("cannot serve: %s", e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

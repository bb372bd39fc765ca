"""`python -m pdq.serve.fetch MODEL [NAME]`: find a model, fetch and convert it if need be, in a process of its own.

`pdq serve` runs this once before it starts its children. What takes time is told on stderr; stdout is one line of JSON,
`[folder, name]`. Exit code 2 with one line on stderr if there is no such model.
"""

from __future__ import annotations

import json
import sys

from pdq.errors import PdqError
from pdq.models import find_model


def main(model: str, name: str | None) -> int:
    try:
        found = find_model(model, served_model_name=name, say=_tell)
    except PdqError as e:
        _tell(f"error: {e.message}")
        return 2
    sys.stdout.write(json.dumps([str(found.folder), found.name]) + "\n")
    return 0


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))

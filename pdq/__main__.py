"""`python -m pdq` is `pdq`."""

import sys

from pdq.cli import main

sys.exit(main())

"""`python -m hvdkit` is `hvdkit`."""

import sys

from hvdkit.cli import main

sys.exit(main())

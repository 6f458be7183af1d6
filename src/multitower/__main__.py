"""`python -m multitower` is `multitower`."""

import sys

from multitower.cli import main

sys.exit(main())

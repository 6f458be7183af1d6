"""`python -m multitower` is `multitower`."""

import sys

from multitower.cli.main import main

sys.exit(main())

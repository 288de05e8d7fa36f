"""`python -m sgray` is the command `sgray`."""

import sys

from sgray.cli import main

sys.exit(main())

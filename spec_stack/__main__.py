"""`python -m spec_stack` runs the command `spec-stack`."""

import sys

from spec_stack.cli.main import main

sys.exit(main())

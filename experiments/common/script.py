"""How every script ends on bad input: one line that says what to change, status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main. What a user can mend is raised as ValueError, OSError or ImportError."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

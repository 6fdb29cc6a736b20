"""The command line: `python -m kvjax.infer "Why is the sky blue?"`; see `kvjax.cli`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

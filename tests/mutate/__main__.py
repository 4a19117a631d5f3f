"""`python -m tests.mutate`: ignores each config field in turn and runs the test that is to notice.

The ranks' forkserver imports this module's package: keep it light.
"""

import sys

from tests.mutate.cli import main

if __name__ == "__main__":
    sys.exit(main())

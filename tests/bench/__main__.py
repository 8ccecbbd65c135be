"""``python -m tests.bench WHAT``, in the root of the source tree: benchmarks for developers, and ``all`` of them.

Errors and output are those of the command hpcfsdp.
"""

import sys

from hpcfsdp.cli.main import VERBS, main

if __name__ == "__main__":
    VERBS["bench"] = ("tests.bench.command", "")
    sys.exit(main(["bench", *sys.argv[1:]]))

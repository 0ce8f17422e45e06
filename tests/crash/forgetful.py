"""A coordinator whose machine is new at each start: of its data directory only the journal is left.

Run as `python -m tests.crash.forgetful`, with the coordinator's own arguments.
"""

import shutil
import sys
from pathlib import Path

from stratagem.coordinator.process.main import main

if __name__ == "__main__":
    for path in Path(sys.argv[sys.argv.index("--data-dir") + 1]).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("journal.sqlite"):
            path.unlink()
    main()

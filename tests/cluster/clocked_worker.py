"""A worker process whose site's clock is a file: TEST_CLOCK names it, and it holds a time."""

import os
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

from stratagem.worker.process import main as worker_main
from stratagem.worker.site.gate import SiteGate


def said() -> datetime:
    return datetime.fromisoformat(Path(os.environ["TEST_CLOCK"]).read_text())


if __name__ == "__main__":
    setattr(worker_main, SiteGate.__name__, partial(SiteGate, clock=said))
    sys.exit(worker_main.main(sys.argv[1:]))

"""Holds a training step of a worker until the test lets it go on; needs no clock."""

import asyncio
import os
from pathlib import Path


class Gate:
    """The test's end of the two pipes at which a gated model waits in every training step."""

    def __init__(self, directory: Path) -> None:
        self.paths = directory / "arrive", directory / "leave"
        for path in self.paths:
            os.mkfifo(path)
        self.kwargs = {"arrive": str(self.paths[0]), "leave": str(self.paths[1])}

    async def arrived(self) -> None:
        await asyncio.to_thread(self.paths[0].read_text)

    async def leave(self) -> None:
        await asyncio.to_thread(self.paths[1].write_text, "go")

    def open(self) -> None:
        """From now on nobody waits."""
        self.paths[0].unlink()

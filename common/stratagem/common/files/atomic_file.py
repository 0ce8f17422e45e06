"""Files that appear whole, or not at all. Knows nothing of what they hold."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well; else nothing has changed.

    mode: the rights of the file, less what the umask takes away; never more, not for a moment.
    durable: it is on the disk before it takes that place. Raises OSError that names `path`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # of a process of this number that was killed
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

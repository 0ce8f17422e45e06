"""A real S3 server as a process of its own, where moto is installed."""

import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_SERVE = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Its endpoint; the bucket is there."""
    pytest.importorskip("moto")
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", _SERVE],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        found = next(m for line in server.stdout if (m := re.search(r"http://[\d.]+:\d+", line)))
        threading.Thread(target=server.stdout.read, daemon=True).start()  # its log fills the pipe
        request = urllib.request.Request(f"{found[0]}/{bucket}", method="PUT")
        urllib.request.urlopen(request).close()
        yield found[0]
    finally:
        server.kill()
        server.communicate()


def s3_settings(endpoint: str) -> dict[str, Any]:
    keys = {"region": "us-east-1", "access_key_id": "x", "secret_access_key": "x"}
    return {"endpoint": endpoint, "client_options": {"allow_http": True}, **keys}

"""Generates the protobuf stubs; `make proto` writes them, a test compares them.

The generator is pinned to grpcio-tools 1.80: its code runs on protobuf 6 and 7, newer ones demand
the newest runtime.
"""

import os
import sys
from importlib import resources
from pathlib import Path

from tests.repository import ROOT

PROTOS = ROOT / "protos"
STUBS = ROOT / "common"


def generate(destination: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi below destination."""
    from grpc_tools import protoc

    # The plug-ins are programs of this environment, which need not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={well_known}",
        f"--python_out={destination}",
        f"--grpc_python_out={destination}",
        f"--mypy_out={destination}",
        f"--mypy_grpc_out=generate_concrete_servicer_stubs:{destination}",
        *sorted(str(path) for path in PROTOS.rglob("*.proto")),
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(STUBS)
    sys.exit(0)

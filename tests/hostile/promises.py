"""What the services promise: every call by reflection, and the codes that its proto names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from stratagem.v1 import coordinator_pb2, peer_pb2, worker_pb2
from tests.generate_stubs import PROTOS

Code = grpc.StatusCode

FILES: Final = (coordinator_pb2, worker_pb2, peer_pb2)
_CODE: Final = re.compile(rf"\b({'|'.join(code.name for code in Code)})\b")
_RPC: Final = re.compile(r"((?:^ *//.*\n)+) *rpc (\w+)\(", re.MULTILINE)
_OTHERS: Final = re.compile(r"codes of (\w+)")


@dataclass(frozen=True)
class Method:
    """One call."""

    service: str
    name: str
    path: str
    request: Any
    """Its class."""
    response: Any
    takes_stream: bool
    gives_stream: bool

    def __str__(self) -> str:
        return f"{self.service}.{self.name}"


@cache
def methods() -> tuple[Method, ...]:
    """Every call of every service."""
    return tuple(
        _method(each)
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for each in service.methods
    )


def method(name: str) -> Method:
    """The call of that name; names are unique over the services."""
    return next(each for each in methods() if each.name == name)


@cache
def documented(each: Method) -> frozenset[grpc.StatusCode]:
    """The codes that the proto file names for a call: those of all, and its own."""
    text = _proto(each.service)
    head = text.partition("syntax =")[0]
    own = {name: comment for comment, name in _RPC.findall(text)}
    named = _CODE.findall(head) + _CODE.findall(own[each.name])
    for other in _OTHERS.findall(own[each.name]):
        named += _CODE.findall(own[other])
    return frozenset(grpc.StatusCode[name] for name in named) | {Code.OK}


def _method(found: MethodDescriptor) -> Method:
    service = found.containing_service
    return Method(
        service=service.name,
        name=found.name,
        path=f"/{service.full_name}/{found.name}",
        request=GetMessageClass(found.input_type),
        response=GetMessageClass(found.output_type),
        takes_stream=found.client_streaming,
        gives_stream=found.server_streaming,
    )


@cache
def _proto(service: str) -> str:
    name = service.removesuffix("Service").lower()
    return (PROTOS / "stratagem" / "v1" / f"{name}.proto").read_text()

"""A coordinator behind TLS with certificates and tokens, and a worker that knows its name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.common.identity.callers import Authorizer, Scope, add_token, new_token
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.server import bind_tls, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.storage import CoordinatorSecurity
from stratagem.coordinator.observe.troubles import Refusals
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2_grpc, worker_pb2_grpc
from tests.coordinator.open_gate import entrance
from tests.coordinator.service.serving import Acquaintance
from tests.patience import PATIENCE_S
from tests.settings import coordinator_settings


@dataclass
class Deployment:
    authority: Authority
    folder: Path
    settings: Settings
    certificates: str
    tokens: str
    app: App
    open: AsyncExitStack

    def has_token(self, name: str) -> bool:
        """Not a certificate: these are called after a role."""
        return name.partition("-")[0] not in tuple(Role)

    def proof(self, name: str) -> Proof:
        """Of a certificate, or of a token made with the scope of this name, else with submit."""
        if not self.has_token(name):
            return Proof(self.authority.files(name))
        file, ca = self.folder / f"token-{name}", self.authority.folder / "ca.crt"
        if not file.exists():
            scope = Scope(name) if name in tuple(Scope) else Scope.SUBMIT
            token, known = new_token(name, [scope])
            add_token(self.folder / "tokens.json", known)
            file.write_text(token)
        return Proof(TlsFiles(ca), file)

    def address(self, name: str) -> str:
        """Where this caller calls."""
        return self.tokens if self.has_token(name) else self.certificates

    async def stub(self, name: str) -> Any:
        channel = await self.open.enter_async_context(
            open_channel(self.address(name), self.proof(name))
        )
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel)


@asynccontextmanager
async def deployed(authority: Authority, folder: Path, **changes: Any) -> AsyncIterator[Deployment]:
    files = authority.files("coordinator")
    settings = coordinator_settings(
        data_dir=folder / "data",
        listen="127.0.0.1:0",
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
        tokens_file=folder / "tokens.json",
        token_listen="127.0.0.1:0",
        **{"worker_ttl_s": PATIENCE_S, **changes},  # its workers have nobody who beats for them
    )
    security = CoordinatorSecurity(settings)
    refusals = Refusals()
    app = await App.lead(settings, entrance(), refusals)
    server = make_server(gate=security.gate, on_refusal={"RegisterWorker": refusals.note})
    servicer = CoordinatorServicer(app)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    address = security.listen(server)
    lenient = bind_tls(server, "127.0.0.1", 0, files, asks_for_certificate=False)
    running = asyncio.create_task(app.run())
    await server.start()
    async with AsyncExitStack() as stack:
        at = f"127.0.0.1:{lenient}"
        yield Deployment(authority, folder, settings, address, at, app, stack)
    await server.stop(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await app.loop.close()


@asynccontextmanager
async def worker(authority: Authority, name: str) -> AsyncIterator[str]:
    server = make_server(gate=Authorizer("stratagem"))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Acquaintance(name), server)
    port = bind_tls(server, "127.0.0.1", 0, authority.files(f"worker-{name}"))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)

"""A small HTTP proxy that connects (CONNECT), in a process of its own: `python -m`.

Prints its port, then a line for each request. It may want USER:PASSWORD, may connect to one port
alone, may open TLS with a certificate of its own as some companies do, and may cut connections
after as many bytes.
"""

import argparse
import asyncio
import base64
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PIECE_BYTES = 65_536


@dataclass
class Proxy:
    credentials: str
    num_cuts: int
    cut_after_bytes: int
    opened: ssl.SSLContext | None
    only_port: str = ""
    goes_to: int = 0
    """The port of this machine that it connects to, whatever it is asked for; 0: what it is."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        place = head.split(" ")[1]
        wanted = "Basic " + base64.b64encode(self.credentials.encode()).decode()
        if self.credentials and f"proxy-authorization: {wanted}".lower() not in head.lower():
            self._refuse(writer, place, "407 Proxy Authentication Required")
            return
        host, _, port = place.rpartition(":")
        if self.only_port and port != self.only_port:
            self._refuse(writer, place, "403 Forbidden")
            return
        host, port = ("127.0.0.1", str(self.goes_to)) if self.goes_to else (host, port)
        try:
            their_reader, their_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            self._refuse(writer, place, "502 Bad Gateway")
            return
        say(f"200 {place}")
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await writer.drain()
        if self.opened is not None:
            await writer.start_tls(self.opened)
        passed = [0]
        await asyncio.gather(
            self._pass(reader, their_writer, writer, passed),
            self._pass(their_reader, writer, their_writer, passed),
        )

    def _refuse(self, writer: asyncio.StreamWriter, place: str, status: str) -> None:
        say(f"{status.split()[0]} {place}")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        writer.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
        passed: list[int],
    ) -> None:
        try:
            while data := await reader.read(PIECE_BYTES):
                passed[0] += len(data)
                if self.num_cuts and passed[0] > self.cut_after_bytes:
                    self.num_cuts -= 1
                    say("cut")
                    writer.transport.abort()
                    back.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def say(line: str) -> None:
    print(line, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--credentials", default="")
    parser.add_argument("--only-port", default="")
    parser.add_argument("--goes-to", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--cut-after", type=int, default=0)
    parser.add_argument("--opens-tls", nargs=2, metavar=("CERT", "KEY"))
    parser.add_argument("--host", default="127.0.0.1")
    given = parser.parse_args()
    opened = None
    if given.opens_tls:
        opened = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        opened.load_cert_chain(*given.opens_tls)
        opened.set_alpn_protocols(["h2"])
    proxy = Proxy(given.credentials, given.cuts, given.cut_after, opened)
    proxy.only_port, proxy.goes_to = given.only_port, given.goes_to
    server = await asyncio.start_server(proxy.serve, given.host, 0)
    say(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


@contextmanager
def running(*arguments: str, within: Sequence[str] = ()) -> Iterator["RunningProxy"]:
    """The proxy in a process of its own; its lines can be read once it has ended. within: a command
    that runs it, such as in a network namespace."""
    command = [*within, sys.executable, "-m", "tests.connect_proxy", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        proxy = RunningProxy(f"127.0.0.1:{process.stdout.readline().strip()}")
        try:
            yield proxy
        finally:
            process.kill()
            proxy.said = process.stdout.read().splitlines()


@dataclass
class RunningProxy:
    address: str
    said: list[str] | None = None


if __name__ == "__main__":
    asyncio.run(main())

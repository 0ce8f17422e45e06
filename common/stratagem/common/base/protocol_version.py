"""The version of the wire protocol that this side speaks, and the metadata key that carries it."""

from typing import Final

PROTOCOL_KEY: Final = "stratagem-protocol"
PROTOCOL_VERSION: Final = "1"

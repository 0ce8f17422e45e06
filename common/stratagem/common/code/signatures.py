"""Ed25519 signatures of digests: those of code bundles, which a reviewer signs, and those of
certificates.
"""

from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.files import check_private, create_private

CODE: Final = "code"
CERTIFICATE: Final = "certificate"
"""The purpose of a signature, signed together with the digest, so that nobody can use the signature
of a code bundle for a certificate or the reverse."""
_PEM_END: Final = "-----END PUBLIC KEY-----"


def make_keys(private: Path, public: Path) -> None:
    """Write a new key pair; only its owner can read the private key. Raises InvalidInputError if
    one of the files exists or cannot be written."""
    key = Ed25519PrivateKey.generate()
    for path in (private, public):
        if path.exists():
            raise InvalidInputError(f"{path}: is there already; name another file")
    try:
        with create_private(private) as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
    except OSError as error:
        raise InvalidInputError(f"{error.filename}: {error.strerror}") from None


def _signed_bytes(digest: str, purpose: str) -> bytes:
    return f"stratagem {purpose} v1\n{digest}".encode()


def sign(digest: str, private: Path, purpose: str = CODE) -> str:
    """Return the hex signature of a digest. Raises InvalidInputError for a file that is not a
    private Ed25519 key, or that others may read."""
    check_private("--key", private)
    try:
        key = load_pem_private_key(private.read_bytes(), password=None)
    except OSError as error:
        raise InvalidInputError.at("--key", f"{private}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise InvalidInputError.at("--key", f"{private}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInputError.at("--key", f"{private}: is no Ed25519 key; see `code keygen`")
    return key.sign(_signed_bytes(digest, purpose)).hex()


def read_public_keys(path: Path) -> tuple[Ed25519PublicKey, ...]:
    """Read the public keys in a file. Raises InvalidInputError unless all are Ed25519 keys."""
    try:
        blocks = path.read_text().split(_PEM_END)
        keys = [load_pem_public_key(f"{block}{_PEM_END}".encode()) for block in blocks[:-1]]
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    trusted = tuple(key for key in keys if isinstance(key, Ed25519PublicKey))
    if len(trusted) < len(keys) or not keys:
        text = "holds other keys than those of `stratagem code keygen`" if keys else "holds no key"
        raise InvalidInputError(f"{path}: {text}")
    return trusted


def is_signed(
    digest: str, signature: str, keys: tuple[Ed25519PublicKey, ...], purpose: str = CODE
) -> bool:
    """Return whether one of these public keys verifies this signature of the digest."""
    for key in keys:
        try:
            key.verify(bytes.fromhex(signature), _signed_bytes(digest, purpose))
        except InvalidSignature:
            continue
        return True
    return False

"""The bucket that a setting names: its form, keys and certificate, and what is said of each."""

import os
import socket
import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role
from stratagem.common.rpc import signed_objects
from stratagem.coordinator.store import bucket as object_store_keys
from stratagem.coordinator.store import bucket as s3
from stratagem.coordinator.store.bucket import check_url, credentials_from_file, open_s3
from tests.coordinator.store.places import Bucket
from tests.coordinator.store.troubled import EMPTY, FORBIDDEN, NOT_IMPLEMENTED, troubled
from tests.patience import PATIENCE_S


def test_a_url_of_another_form_is_refused_with_what_is_allowed() -> None:
    for url in ("s3:/x", "gs://b", "s3://", "s3://UPPER/x", "s3://b/../x", "s3://b?x=1", "/x"):
        with pytest.raises(InvalidInputError, match=r"blob_store: .* is not s3://BUCKET"):
            check_url(url)
    allowed = r"with a prefix of letters, digits, '-', '_', '\.' and '/'"
    for prefix in ("two words", "a+b", "modèles", "a%20b", "a//b"):
        with pytest.raises(InvalidInputError, match=allowed):
            check_url(f"s3://bucket/{prefix}")


def test_a_store_whose_certificate_nobody_has_signed_that_is_known_is_named_with_what_to_do(
    bucket: Bucket, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_authority(tmp_path / "certs").issue(Role.COORDINATOR, "store", ["127.0.0.1"])
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with troubled(s3_endpoint, files) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setitem(s3._RETRIES, "max_retries", 1)
        refused = r"certificate of https://\S+ \(AWS_ENDPOINT_URL\) is refused: UnknownIssuer; SSL_"
        with pytest.raises(InvalidInputError, match=refused) as error:
            open_s3(bucket.url, os.environ, signs=True)
        assert "its certificate is refused: UnknownIssuer" in str(error.value.__cause__)
        monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
        monkeypatch.setattr(signed_objects, "_tls", ssl.create_default_context)
        assert open_s3(bucket.url, os.environ, signs=True).list("blobs") == []
        assert server.num_signed == 2


def test_a_store_that_does_not_copy_is_refused_for_direct_states(
    bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(s3._RETRIES, "max_retries", 1)
    answers: list[tuple[int | str, str]] = [
        (NOT_IMPLEMENTED, "501 Not Implemented"),
        (FORBIDDEN, "403 Forbidden"),
        (EMPTY, "the copy has other bytes"),
    ]
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        for answer, reason in answers:
            server.always_of_copies = answer
            lacks = rf"does not copy an object \(CopyObject\): .*{reason}.* --state-path direct"
            with pytest.raises(InvalidInputError, match=lacks):
                open_s3(bucket.url, os.environ, signs=True)
        assert open_s3(bucket.url, os.environ).list("trial") == []


def test_what_cannot_be_opened_is_named_with_what_to_do_and_without_keys(
    bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match=r"s3://elsewhere/x: there is no such bucket at"):
        open_s3("s3://elsewhere/x", bucket.environ)
    monkeypatch.setitem(s3._RETRIES, "max_retries", 1)
    with troubled(s3_endpoint) as server, monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        server.always = FORBIDDEN
        with pytest.raises(InvalidInputError, match="refuses the keys from the environment") as e:
            open_s3(bucket.url, os.environ)
        assert "very-secret" not in str(e.value)
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(InvalidInputError, match=rf"{endpoint} .* cannot be reached"):
            open_s3(bucket.url, os.environ)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InvalidInputError, match="has no TLS; set AWS_ALLOW_HTTP=true"):
        open_s3(bucket.url, os.environ)


def test_keys_come_from_a_file(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = abc\naws_secret_access_key = %def\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    assert open_s3(bucket.url, os.environ).list("blobs") == []
    provider = credentials_from_file(os.environ)
    assert provider is not None
    found = provider()
    assert (found["access_key_id"], found["secret_access_key"]) == ("abc", "%def")
    assert credentials_from_file({"AWS_ACCESS_KEY_ID": "x", **os.environ}) is None


def test_changed_keys_are_taken_without_a_restart(
    bucket: Bucket, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    form = "[default]\naws_access_key_id = {}\naws_secret_access_key = x\n"
    monkeypatch.setattr(object_store_keys, "VALID_FOR", timedelta(seconds=1))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        file.write_text(form.format("first"))
        store = open_s3(bucket.url, os.environ)

        def list_until_keys_are(key: str) -> None:  # the library asks anew after 0.1 s
            until_s = time.monotonic() + PATIENCE_S
            while f"Credential={key}/" not in server.last_authorization:
                assert time.monotonic() < until_s
                store.list("blobs")

        list_until_keys_are("first")
        file.write_text(form.format("second"))
        list_until_keys_are("second")
        file.unlink()
        with pytest.raises(UnavailableError, match="cannot be read: No such file"):
            list_until_keys_are("third")
        file.write_text(form.format("third"))
        list_until_keys_are("third")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("secret", "is no file of"),
        ("[other]\nx = secret", r"has no section \[default\]"),
        ("[default]\naws_access_key_id = secret", "has no aws_secret_access_key"),
    ],
)
def test_a_file_without_keys_is_refused_and_not_quoted(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    file = tmp_path / "credentials"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidInputError, match=reason) as caught:
        credentials_from_file({"AWS_SHARED_CREDENTIALS_FILE": str(file)})
    assert "AWS_SHARED_CREDENTIALS_FILE" in str(caught.value)
    assert "secret" not in str(caught.value).replace("aws_secret_access_key", "")

"""Makes the keys of docker-compose's profile `s3`: python3 deploy/docker/s3_secrets.py [FOLDER]

Writes FOLDER/credentials for the coordinator and FOLDER/server for the S3 server (secrets/s3 unless
named), and prints the variables that docker-compose wants. Files that are there are left alone.
Each container sees its own file alone; the folder keeps other users of this machine out, since the
files themselves must be readable by whatever user a container runs as.
"""

import secrets
import sys
from pathlib import Path

CREDENTIALS = "[default]\naws_access_key_id = {user}\naws_secret_access_key = {password}\n"
SERVER = "export MINIO_ROOT_USER={user}\nexport MINIO_ROOT_PASSWORD={password}\n"


def main(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {"credentials": CREDENTIALS, "server": SERVER}
    there = [name for name in files if (folder / name).exists()]
    if there and len(there) < len(files):
        sys.exit(f"{folder}: only {there[0]} is there, and its keys fit no other file; delete it")
    if not there:
        keys = {"user": secrets.token_hex(8), "password": secrets.token_urlsafe(30)}
        for name, form in files.items():
            (folder / name).write_text(form.format(**keys))
            (folder / name).chmod(0o444)
    print(f"S3_CREDENTIALS={folder}/credentials")
    print(f"S3_SERVER_SECRETS={folder}/server")
    print("STRATAGEM_BLOB_STORE=s3://stratagem/states")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "secrets/s3").absolute())

#!/usr/bin/env bash
# Builds both images; `make images` calls it.
#
#   BASE_IMAGE       what they stand on (python:3.11-slim-bookworm)
#   TAG              of both images (the version in pyproject.toml)
#   TORCH_INDEX_URL  where torch comes from (PyTorch's index of CPU builds; empty: as all others)
#   WORKER_EXTRAS    extras of the worker image (worker,s3,examples,privacy)
#   WHEELS_FROM      a Python whose pip fetches all packages here first, with the settings of this
#                    machine (mirrors, certificates); the engine then needs no network. It must
#                    have the version of the base image's Python.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${BASE_IMAGE:-python:3.11-slim-bookworm}
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
extras=${WORKER_EXTRAS:-worker,s3,examples,privacy}
index=${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}
options=()

fetch_wheels() {
    local wheels=deploy/docker/wheels needed what
    needed=$("$WHEELS_FROM" deploy/docker/requirements.py pyproject.toml "coordinator,s3,postgres,privacy,$extras")
    what=$(cat <(echo "$needed $index $WHEELS_FROM") constraints.txt | sha256sum)
    if [ "$(cat "$wheels/.fetched" 2> /dev/null)" = "$what" ]; then
        return
    fi
    rm -f "$wheels"/*.whl "$wheels/.fetched"
    "$WHEELS_FROM" -m pip download --quiet --disable-pip-version-check --only-binary :all: \
        --constraint constraints.txt --dest "$wheels" ${index:+--extra-index-url "$index"} \
        --requirement <(echo "$needed") torch hatchling
    echo "$what" > "$wheels/.fetched"
}

if [ -n "${WHEELS_FROM:-}" ]; then
    fetch_wheels
    options+=(--build-arg PIP_NO_INDEX=1 --network none)
fi

for target in coordinator worker; do
    docker build --file deploy/docker/Dockerfile --target "$target" \
        --build-arg BASE_IMAGE="$base" --build-arg TORCH_INDEX_URL="$index" \
        --build-arg WORKER_EXTRAS="$extras" ${options[@]+"${options[@]}"} \
        --tag "stratagem-$target:$tag" .
done

#!/usr/bin/env bash
# Makes a stand-in for python:3.11-slim-bookworm where no image registry can be reached: a small
# Debian with its own Python 3.11. Needs root, debootstrap and a running engine; about a minute.
#
#   deploy/docker/base_image.sh [TAG] [MIRROR]
#
# Does nothing when the engine has the tag already.
set -euo pipefail
tag=${1:-stratagem-base:bookworm}
mirror=${2:-http://deb.debian.org/debian}

if docker image inspect "$tag" > /dev/null 2>&1; then
    exit 0
fi
root=$(mktemp --directory)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
    bookworm "$root" "$mirror" > /dev/null
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/usr/share/{doc,man,locale}/*
tar --create --numeric-owner --directory "$root" . | docker import - "$tag" > /dev/null

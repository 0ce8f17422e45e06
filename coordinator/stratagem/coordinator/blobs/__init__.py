"""The states of all runs: content-addressed files under one folder.

    store.py     blobs by digest: write, open, collect
    durable.py   files that are hashed while they are written and survive a power cut

Knows bytes and digests. What a blob holds is the business of `common/tensors/safefile.py`.
"""

from stratagem.coordinator.blobs.store import BlobStore, BlobWriter, Scratch

__all__ = ["BlobStore", "BlobWriter", "Scratch"]

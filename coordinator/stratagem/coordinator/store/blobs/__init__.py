"""The states of all runs: content-addressed blobs.

    blob_store.py       what a store promises, and how a blob is written
    directory_blobs.py  blobs as files under one folder
    object_store.py     objects below a prefix of a bucket; s3.py opens one, object_store_keys.py
                        has the keys
    blob_cache.py       local copies, up to a number of bytes
    shared_blobs.py     blobs as objects that several coordinators share
    verified_file.py    blobs as open files, of which every byte is checked when it is read
    durable_file.py     files that are hashed while they are written and survive a power cut
    temporary_files.py  files that vanish with their writer

Knows bytes and digests. What a blob holds is the business of
`stratagem.common.tensors.files`.
"""

"""States in leaves: what workers write by themselves, into a folder or by signed requests.

    leaf_blobs.py   the blob store that has such states beside whole files
    state_places.py the places of them: a folder, and the prefix of a bucket
    leaf_store.py   what a place of leaves promises
    leaf_files.py   the files of leaves: opened and verified, and collected
    leaf_objects.py the same for the objects of a bucket, with signed requests
    leaf_claims.py  which leaves are in use: by uploads that are under way, and by readers
    leaf_upload.py  an upload that is under way
    leaf_writer.py  a state that the coordinator itself cuts into leaves
    joined_state.py the file that a state's leaves make

Knows bytes and digests, and neither runs nor workers. What a leaf is, is the business of
`stratagem.common.tensors.leaves`, what files are called that of
`stratagem.common.tensors.leaves`.
"""

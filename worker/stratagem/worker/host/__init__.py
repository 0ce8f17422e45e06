"""Resources of one worker process that all its sessions share: torch thread, blobs, clock.

Blob: uploaded tensors named by digest, such as a committed state. Stay: the time that a thread
spends at one activity. Incarnation: the identifier of one process, as its worker may be restarted.
"""

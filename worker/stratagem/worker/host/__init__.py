"""Resources of one worker process that all its sessions share: torch thread, blobs, clock.

Blob: uploaded tensors named by digest, such as a committed state. Stay: the time that a thread
spends at one activity. Incarnation: a number that each process of a worker name gets.
"""

"""What a machine's device computes, checked and measured: `make gpu`, `make gpu DEVICE=cpu`.

Each check is a process of its own, so that one which loses the device or hangs spoils no other.
"""

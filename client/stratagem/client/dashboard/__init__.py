"""The dashboard is a page on which runs can be watched; it is a process of its own, and an
ordinary client of the coordinator.
"""

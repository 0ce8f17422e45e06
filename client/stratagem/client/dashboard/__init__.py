"""The dashboard is a page that shows runs; it is a process of its own, and an ordinary client of
the coordinator."""

"""`stratagem doctor` on a worker: what is wrong with its settings, its machine, its neighbours."""

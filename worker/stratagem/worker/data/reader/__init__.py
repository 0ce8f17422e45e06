"""Reader processes, which fetch rows and make batches of them ahead of their use."""

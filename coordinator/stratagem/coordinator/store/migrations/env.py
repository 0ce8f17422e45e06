"""Alembic runs this: migrate on the connection, and in the transaction, that it was given."""

from alembic import context

from stratagem.coordinator.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite's too, as our transactions begin by themselves
)
context.run_migrations()

"""Run by Alembic: migrates on the given connection, inside the transaction that is open there."""

from alembic import context

from stratagem.coordinator.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite's too, as our transactions begin by themselves
)
context.run_migrations()

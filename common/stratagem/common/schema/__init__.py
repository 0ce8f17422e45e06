"""Read JSON documents strictly, by classes with typed fields and errors that name a field."""

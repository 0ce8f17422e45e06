"""Updates on their way from acceptance to their round: on disk, or in an object store."""

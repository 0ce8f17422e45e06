"""What all effects act through: the context, plans on workers, intake of reports."""

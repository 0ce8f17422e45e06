"""The means by which all effects act: the context, plans on workers, intake of reports."""

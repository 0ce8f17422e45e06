"""Present a run as a page without scripts: pictures, chosen by its strategy, tables, its job."""

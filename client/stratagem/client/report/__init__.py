"""Present a run as a page without scripts: pictures of its course by strategy, tables, its job."""

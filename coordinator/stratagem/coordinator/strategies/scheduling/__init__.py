"""Which workers a run gets, and where its steps are cut into segments."""

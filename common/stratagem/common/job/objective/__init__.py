"""What a job minimises and measures: names that have a meaning, and checks of the objective."""

"""Pipeline parallelism as data: schedules, their simulation, the tags of transfers."""

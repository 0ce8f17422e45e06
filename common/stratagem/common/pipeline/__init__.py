"""Pipeline parallelism is described as data: schedules, their simulation, the tags of transfers."""

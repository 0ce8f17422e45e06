"""Programs that examine a job or a worker from outside: check, planning, export and doctor."""

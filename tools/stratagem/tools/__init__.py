"""Programs that look at a job or a worker without being one: planning and doctor."""

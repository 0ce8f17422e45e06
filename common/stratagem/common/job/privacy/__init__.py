"""What goes together with the section `privacy` of a job."""

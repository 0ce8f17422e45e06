"""Rules of jobs that are submitted, beyond those that every job keeps."""

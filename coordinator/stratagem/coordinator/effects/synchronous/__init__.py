"""Effects of parties that train in step: build, segments, commits, evaluation."""

"""Launch workers by engines that start processes on many machines, such as Slurm."""

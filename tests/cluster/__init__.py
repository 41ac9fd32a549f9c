"""Jobs of Slurm on an emulated cluster: two nodes of one machine, each in namespaces of its own."""

"""Named workloads, each against its peers and the machine's own limits in the same run."""

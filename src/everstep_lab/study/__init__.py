"""Studies: weeks of a cluster's life in seconds, under several systems' policies, on one throughput model."""
